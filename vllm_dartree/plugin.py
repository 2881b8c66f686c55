"""The entry point ``vllm.general_plugins``: vLLM calls ``register`` in every process it starts.

All that it changes in vLLM asks first whether the method ``dartree`` is meant; every other method is left alone.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any


def register() -> None:
    """Teaches vLLM the method ``dartree``. Does nothing the second time.

    On a vLLM that lacks a seam vLLM itself still starts; whoever asks for the method is told then (``compat``).
    """
    for teach in (
        _accept_the_method,
        _check_the_finished_config,
        _reserve_the_block,
        _allow_row_local,
        _add_the_models,
    ):
        try:
            teach()
        except (ImportError, AttributeError) as error:
            logging.getLogger("vllm.dartree").warning(
                "vllm-dartree does not fit this vLLM (%s); 'vllm-dartree check' says what is missing", error
            )
    from vllm_dartree import emulation

    if emulation.is_active():
        emulation.mend_vllm()


def _wrap(owner: type, name: str, make: Callable[[Callable], Callable]) -> None:
    """Replaces a method of vLLM's by ``make(method)``, once."""
    native = getattr(owner, name)
    if hasattr(native, "dartree"):
        return
    wrapper = functools.wraps(native)(make(native))
    wrapper.dartree = True
    setattr(owner, name, wrapper)


def _accept_the_method() -> None:
    from vllm.engine.arg_utils import EngineArgs

    def make(native: Callable) -> Callable:
        def create_speculative_config(self: EngineArgs, target_model_config: Any, target_parallel_config: Any) -> Any:
            if "dartree" not in ((self.speculative_config or {}).get("method"), getattr(self, "spec_method", None)):
                return native(self, target_model_config, target_parallel_config)
            from vllm_dartree import compat

            compat.require_installed()
            from vllm_dartree import config

            return config.create_speculative_config(self, native, target_model_config, target_parallel_config)

        return create_speculative_config

    _wrap(EngineArgs, "create_speculative_config", make)


def _check_the_finished_config() -> None:
    from vllm.engine.arg_utils import EngineArgs

    def make(native: Callable) -> Callable:
        def create_engine_config(self: EngineArgs, *args: Any, **kwargs: Any) -> Any:
            vllm_config = native(self, *args, **kwargs)
            if _is_dartree(vllm_config.speculative_config):
                from vllm_dartree import config

                config.check_supported(vllm_config)
            return vllm_config

        return create_engine_config

    _wrap(EngineArgs, "create_engine_config", make)


def _reserve_the_block() -> None:
    """The scheduler reserves cache for the drafter's block by this property, which counts ``B + 1`` slots for it."""
    from vllm.config import VllmConfig

    native = VllmConfig.num_lookahead_tokens
    if hasattr(native.fget, "dartree"):
        return

    @functools.wraps(native.fget)
    def num_lookahead_tokens(self: VllmConfig) -> int:
        speculative = self.speculative_config
        return speculative.num_lookahead_tokens if _is_dartree(speculative) else native.fget(self)

    num_lookahead_tokens.dartree = True
    VllmConfig.num_lookahead_tokens = property(num_lookahead_tokens)


def _allow_row_local() -> None:
    """vLLM refuses ``min_p`` and ``logit_bias`` with speculation; both look at one row alone, so on a tree they are
    exact, since every row is sampled by vLLM's own sampler."""
    from vllm.sampling_params import SamplingParams

    def make(native: Callable) -> Callable:
        def _validate_spec_decode(self: SamplingParams, speculative_config: Any) -> None:
            if not _is_dartree(speculative_config):
                native(self, speculative_config)

        return _validate_spec_decode

    _wrap(SamplingParams, "_validate_spec_decode", make)


def _add_the_models() -> None:
    from vllm import ModelRegistry

    from vllm_dartree.engine.draft_models import KINDS

    known = ModelRegistry.get_supported_archs()
    for kind in KINDS:
        # What vLLM does not know is ours altogether; its dflash looks an architecture up with and without its prefix.
        names = [kind.registered_name(), *kind.architectures, *(f"DFlash{name}" for name in kind.architectures)]
        for name in names if kind.vllm_model else ():
            if name not in known:
                ModelRegistry.register_model(name, kind.vllm_model)


def _is_dartree(speculative_config: Any) -> bool:
    return getattr(speculative_config, "is_dartree", False)
