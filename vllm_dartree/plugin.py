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
        _choose_the_graphs,
        _let_requests_in,
        _add_the_models,
        _report_trees,
        _bind_trees_by_grammars,
        _choose_budgets,
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
                from vllm_dartree import features

                features.check_supported(vllm_config)
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


def _choose_the_graphs() -> None:
    """vLLM's own sizes of CUDA graphs end at 512 tokens, which are seven requests of 65 rows."""
    from vllm.config import VllmConfig

    def make(native: Callable) -> Callable:
        def _set_cudagraph_sizes(self: VllmConfig) -> None:
            compilation = self.compilation_config
            is_given = (compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size) != (None, None)
            native(self)
            if _is_dartree(self.speculative_config) and not is_given and compilation.cudagraph_capture_sizes:
                from vllm_dartree import graphs

                graphs.add_graph_sizes(self)
                native(self)  # which drops and checks as it does with sizes that a user gives

        return _set_cudagraph_sizes

    _wrap(VllmConfig, "_set_cudagraph_sizes", make)


def _let_requests_in() -> None:
    """vLLM refuses ``min_p`` and ``logit_bias`` with speculation; both look at one row alone, so on a tree they are
    exact, since every row is sampled by vLLM's own sampler.

    It lets in prompts that come in parts, though a part that ends amid an accepted path leaves vLLM 0.32's scheduler
    with tokens counted as computed that it has cut off.
    """
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.input_processor import InputProcessor

    def make_process(native: Callable) -> Callable:
        def process_inputs(self: InputProcessor, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("resumable") and _is_dartree(self.vllm_config.speculative_config):
                raise VLLMValidationError(
                    "method 'dartree' does not work with streaming input, a prompt that arrives in parts; send the "
                    "whole prompt, or serve without speculation"
                )
            return native(self, *args, **kwargs)

        return process_inputs

    def make(native: Callable) -> Callable:
        def _validate_spec_decode(self: SamplingParams, speculative_config: Any) -> None:
            if not _is_dartree(speculative_config):
                return native(self, speculative_config)
            from vllm_dartree import metrics

            metrics.count_chain_request(speculative_config)

        return _validate_spec_decode

    _wrap(InputProcessor, "process_inputs", make_process)
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


def _report_trees() -> None:
    """Metrics and the periodic line of the log, besides and in place of vLLM's own for speculation."""
    from vllm.v1.metrics.loggers import LoggingStatLogger, PrometheusStatLogger

    def make_logging(native: Callable) -> Callable:
        def __init__(self: LoggingStatLogger, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            native(self, *args, **kwargs)
            if _is_dartree(self.vllm_config.speculative_config):
                from vllm_dartree.metrics import TreeLogging

                self.spec_decoding_logging = TreeLogging(self.vllm_config)

        return __init__

    def make_metrics(native: Callable) -> Callable:
        def __init__(self: PrometheusStatLogger, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            native(self, *args, **kwargs)
            if _is_dartree(self.vllm_config.speculative_config):
                from vllm_dartree.metrics import TreeMetrics

                labels = self.per_engine_labelvalues
                self.dartree = TreeMetrics(self._counter_cls, self._histogram_cls, self.vllm_config, labels)

        return __init__

    def make_record(native: Callable) -> Callable:
        def record(
            self: PrometheusStatLogger,
            scheduler_stats: Any,
            iteration_stats: Any,
            mm_cache_stats: Any = None,
            engine_idx: int = 0,
        ) -> None:
            native(self, scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)
            stats = scheduler_stats and scheduler_stats.spec_decoding_stats
            if stats and _is_dartree(self.vllm_config.speculative_config):
                self.dartree.observe(stats, engine_idx)

        return record

    _wrap(LoggingStatLogger, "__init__", make_logging)
    _wrap(PrometheusStatLogger, "__init__", make_metrics)
    _wrap(PrometheusStatLogger, "record", make_record)


def _bind_trees_by_grammars() -> None:
    """vLLM's scheduler masks, and checks, the drafts of a request as those of a chain."""
    from vllm.v1.structured_output import StructuredOutputManager

    from vllm_dartree import grammars

    def make_validate(native: Callable) -> Callable:
        def validate_tokens(self: StructuredOutputManager, request: Any, spec_tokens: list[int]) -> list[int]:
            if _is_dartree(self.vllm_config.speculative_config):
                return spec_tokens
            return native(self, request, spec_tokens)

        return validate_tokens

    def make_bitmask(native: Callable) -> Callable:
        def grammar_bitmask(
            self: StructuredOutputManager,
            requests: Any,
            structured_output_request_ids: list[str],
            scheduled_spec_decode_tokens: dict[str, list[int]],
        ) -> Any:
            asked = requests, structured_output_request_ids, scheduled_spec_decode_tokens
            speculative = self.vllm_config.speculative_config
            if not _is_dartree(speculative):
                return native(self, *asked)
            return grammars.fill_masks(self, native, *asked, min_nodes=speculative.drafter.num_slots)

        return grammar_bitmask

    _wrap(StructuredOutputManager, "validate_tokens", make_validate)
    _wrap(StructuredOutputManager, "grammar_bitmask", make_bitmask)


def _choose_budgets() -> None:
    """``"tree_budget": "auto"`` puts a controller where vLLM's scheduler looks up a budget by batch size."""
    from vllm.v1.core.sched.scheduler import Scheduler

    from vllm_dartree.budget import BudgetController

    def make_scheduler(native: Callable) -> Callable:
        def __init__(self: Scheduler, vllm_config: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            native(self, vllm_config, *args, **kwargs)
            speculative = vllm_config.speculative_config
            if _is_dartree(speculative) and speculative.auto_budget:
                self.dynamic_sd_lookup = BudgetController(speculative.num_speculative_tokens)

        return __init__

    def make_schedule(native: Callable) -> Callable:
        def schedule(self: Scheduler, *args: Any, **kwargs: Any) -> Any:
            controller = self.dynamic_sd_lookup
            if not isinstance(controller, BudgetController):
                return native(self, *args, **kwargs)
            if not self.running:
                controller.pause()
            output = native(self, *args, **kwargs)
            controller.begin_step(output.num_scheduled_tokens.values())
            return output

        return schedule

    def make_stats(native: Callable) -> Callable:
        def make_spec_decoding_stats(
            self: Scheduler, stats: Any, num_draft_tokens: int, num_accepted_tokens: int, *args: Any, **kwargs: Any
        ) -> Any:
            if isinstance(self.dynamic_sd_lookup, BudgetController):
                self.dynamic_sd_lookup.observe_round(num_draft_tokens, num_accepted_tokens)
            return native(self, stats, num_draft_tokens, num_accepted_tokens, *args, **kwargs)

        return make_spec_decoding_stats

    _wrap(Scheduler, "__init__", make_scheduler)
    _wrap(Scheduler, "schedule", make_schedule)
    _wrap(Scheduler, "make_spec_decoding_stats", make_stats)


def _is_dartree(speculative_config: Any) -> bool:
    return getattr(speculative_config, "is_dartree", False)
