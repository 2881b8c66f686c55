"""What vLLM can do that method ``dartree`` cannot be combined with, refused by name before any memory is taken."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig, VllmConfig
    from vllm.engine.arg_utils import EngineArgs

logger = logging.getLogger("vllm.dartree")

# Attention backends whose cache is vLLM's paged one with a slot's key and value side by side, and the CPU's.
PAGED_BACKENDS = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN")
BACKENDS = (*PAGED_BACKENDS, "CPU_ATTN")


class DartreeConfigError(ValueError):
    """Something in the configuration cannot work with dartree; the message names it and what is allowed."""


@dataclasses.dataclass(frozen=True)
class Feature:
    """A feature of vLLM that cannot be combined with this method.

    Args:
        name: how vLLM calls it.
        value: what the config, or the early view of it, says about it; anything falsy says that it is off.
        reason: why it cannot work.
        remedy: what to do instead.
    """

    name: str
    value: Callable[[Any], Any]
    reason: str
    remedy: str


def _text(config: Any, key: str) -> Any:
    return getattr(config.model_config.hf_text_config, key, None)


def _larger_than_one(size: int) -> int:
    return size if size > 1 else 0


def _other_backends(config: Any) -> str:
    """The attention backends that the user asks for and that cannot verify trees."""
    asked = config.attention_config
    names = [backend.name for backend in (asked.backend, *asked.backend_per_kind.values()) if backend is not None]
    return ", ".join(name for name in names if name not in BACKENDS)


def _checkpoint_kv_scheme(config: Any) -> Any:
    """What the target's checkpoint asks for; vLLM follows it where the user asks for nothing."""
    if config.cache_config.cache_dtype != "auto":
        return None
    return (getattr(config.model_config.hf_config, "quantization_config", None) or {}).get("kv_cache_scheme")


_TREE_ATTENTION = "the attention over a tree does not compute it"
_OTHER_TARGET = "use another target, or serve this one without method 'dartree'"
UNSUPPORTED = (
    Feature(
        "pipeline parallelism (pipeline_parallel_size)",
        lambda c: _larger_than_one(c.parallel_config.pipeline_parallel_size),
        "the drafter reads hidden states of all of the target's layers in one process",
        "set it to 1, e.g. in favour of tensor_parallel_size",
    ),
    Feature(
        "prefill context parallelism (prefill_context_parallel_size)",
        lambda c: _larger_than_one(c.parallel_config.prefill_context_parallel_size),
        "a tree's rows would be spread over ranks",
        "set it to 1",
    ),
    Feature(
        "decode context parallelism (decode_context_parallel_size)",
        lambda c: _larger_than_one(c.parallel_config.decode_context_parallel_size or 1),
        "a tree's KV would be spread over ranks",
        "set it to 1",
    ),
    Feature(
        "dual-batch overlap (enable_dbo, ubatch_size)",
        lambda c: c.parallel_config.use_ubatching,
        "it would cut a batch through its trees",
        "leave it off",
    ),
    Feature(
        "batch-sharded sampling (enable_batch_sharded_sampling)",
        lambda c: c.parallel_config.enable_batch_sharded_sampling,
        "its shards know nothing of trees and would emit wrong tokens",
        "leave it off",
    ),
    Feature(
        "a KV connector (kv_transfer_config, kv_offloading_size)",
        lambda c: (
            getattr(c.kv_transfer_config, "kv_connector", None) or getattr(c.cache_config, "kv_offloading_size", None)
        ),
        "it may save the KV of a step before the accepted path is in its place",
        "leave it out",
    ),
    Feature(
        "a quantised KV cache (kv_cache_dtype)",
        lambda c: (
            c.cache_config.cache_dtype
            if c.cache_config.cache_dtype not in ("auto", "bfloat16", "float16", "float32")
            else None
        ),
        _TREE_ATTENTION,
        "set it to auto",
    ),
    Feature(
        "a checkpoint with a quantised KV cache (kv_cache_scheme)",
        _checkpoint_kv_scheme,
        _TREE_ATTENTION,
        "set kv_cache_dtype to the model's own type, e.g. bfloat16",
    ),
    Feature(
        "an attention backend of the user's choice (attention_backend)",
        _other_backends,
        "it is not known how its cache is laid out",
        f"choose one of {', '.join(BACKENDS)}, or leave it out",
    ),
    Feature(
        "fast prefill with shared KV (kv_sharing_fast_prefill)",
        lambda c: c.cache_config.kv_sharing_fast_prefill,
        "the drafter needs the hidden states of every token",
        "leave it off",
    ),
    Feature(
        "watermarking (watermark_config)",
        lambda c: c.watermark_config is not None,
        "its context is the row before, which on a tree may be a sibling",
        "leave it out",
    ),
    Feature(
        "trace replay (enable_trace_replay)",
        lambda c: c.model_config.enable_trace_replay,
        "it replays a sequence of tokens and not a tree",
        "leave it off",
    ),
    Feature(
        "sampling masks (return_sampling_mask)",
        lambda c: c.model_config.return_sampling_mask,
        "they would come back in the order of the tree's rows",
        "leave it off",
    ),
    Feature(
        "routed experts in the output (enable_return_routed_experts)",
        lambda c: c.aux_output_config.enabled,
        "they would come back in the order of the tree's rows",
        "leave it off",
    ),
    Feature(
        "Engram layers (engram_config)",
        lambda c: c.engram_config is not None,
        "they embed n-grams of the rows before, which on a tree may be siblings",
        _OTHER_TARGET,
    ),
    Feature(
        "a diffusion target",
        lambda c: c.model_config.is_diffusion,
        "it does not decode from left to right",
        _OTHER_TARGET,
    ),
    Feature(
        "a pooling model (runner)",
        lambda c: c.model_config.runner_type if c.model_config.runner_type != "generate" else None,
        "it generates nothing",
        "leave speculative_config out",
    ),
    Feature(
        "an encoder-decoder target",
        lambda c: c.model_config.is_encoder_decoder,
        "its cross-attention was not tried with trees",
        _OTHER_TARGET,
    ),
    Feature(
        "a target with recurrent layers (Mamba, GDN and other hybrids)",
        lambda c: c.model_config.is_hybrid or c.model_config.is_attention_free or c.model_config.has_inner_state,
        "a recurrent state has no branches",
        _OTHER_TARGET,
    ),
    Feature(
        "a target with MLA",
        lambda c: c.model_config.use_mla,
        _TREE_ATTENTION,
        _OTHER_TARGET,
    ),
    Feature(
        "a target with M-RoPE",
        lambda c: c.model_config.uses_mrope,
        "a tree's rows move along one position, not three",
        _OTHER_TARGET,
    ),
    Feature(
        "a target with chunked local attention (attention_chunk_size, layer_types)",
        lambda c: c.model_config.attention_chunk_size or "chunked_attention" in (_text(c, "layer_types") or ()),
        _TREE_ATTENTION,
        _OTHER_TARGET,
    ),
    Feature(
        "a target with dual chunk attention (dual_chunk_attention_config)",
        lambda c: bool(getattr(c.model_config.hf_config, "dual_chunk_attention_config", None)),
        _TREE_ATTENTION,
        _OTHER_TARGET,
    ),
    Feature(
        "a target with ALiBi",
        lambda c: c.model_config.uses_alibi,
        _TREE_ATTENTION,
        _OTHER_TARGET,
    ),
    Feature(
        "a target with reference sliding window attention (rswa_window)",
        lambda c: c.model_config.rswa_window,
        _TREE_ATTENTION,
        _OTHER_TARGET,
    ),
    Feature(
        "a target with attention sinks",
        lambda c: (
            "GptOssForCausalLM" in c.model_config.architectures
            or _text(c, "add_swa_attention_sink_bias")
            or _text(c, "add_full_attention_sink_bias")
        ),
        _TREE_ATTENTION,
        _OTHER_TARGET,
    ),
    Feature(
        "a target whose layers share KV (num_kv_shared_layers)",
        lambda c: _text(c, "num_kv_shared_layers"),
        "moving the accepted path's KV was not tried with it",
        _OTHER_TARGET,
    ),
)


def check_features(config: Any) -> None:
    """Refuses a config, or the early view of one, that has a feature of ``UNSUPPORTED``.

    Raises:
        DartreeConfigError: naming the feature, its value, the reason and the remedy.
    """
    for feature in UNSUPPORTED:
        value = feature.value(config)
        if value:
            shown = "on" if value is True else repr(value)
            raise DartreeConfigError(
                f"method 'dartree' does not work with {feature.name}, which is {shown} here: {feature.reason}; "
                f"{feature.remedy}"
            )


def early_view(args: EngineArgs, model: ModelConfig, parallel: ParallelConfig) -> SimpleNamespace:
    """As much of a ``VllmConfig`` as ``UNSUPPORTED`` asks for.

    vLLM's own checks of the finished config would come first and speak of ``dflash`` or EAGLE.
    """
    return SimpleNamespace(
        model_config=model,
        parallel_config=parallel,
        cache_config=SimpleNamespace(
            cache_dtype=args.kv_cache_dtype,
            kv_sharing_fast_prefill=args.kv_sharing_fast_prefill,
            kv_offloading_size=args.kv_offloading_size,
        ),
        attention_config=args.attention_config,
        kv_transfer_config=args.kv_transfer_config,
        watermark_config=args.watermark_config,
        aux_output_config=args.aux_output_config,
        engram_config=args.engram_config,
    )


def check_runner() -> None:
    """Refuses what makes vLLM fall back to its V1 model runner whatever else is configured."""
    from vllm import envs
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON

    if envs.VLLM_USE_V2_MODEL_RUNNER is False:
        raise DartreeConfigError(
            "VLLM_USE_V2_MODEL_RUNNER is 0, which asks for vLLM's V1 model runner, but method 'dartree' needs V2; "
            "unset the variable"
        )
    if not HAS_TRITON and current_platform.is_cpu():
        raise DartreeConfigError(
            "vLLM runs on a CPU here, where Triton has no driver and vLLM takes its V1 model runner; method 'dartree' "
            "needs V2. To try it on a CPU, slowly, run the command through: vllm-dartree emulate -- COMMAND"
        )
    if not HAS_TRITON:
        raise DartreeConfigError(
            "vLLM finds no working Triton, so it takes its V1 model runner, but method 'dartree' needs V2; install the "
            "Triton that belongs to your PyTorch and check that it sees one GPU driver"
        )


def check_supported(vllm_config: VllmConfig) -> None:
    """Refuses a finished config with a feature that this method cannot be combined with.

    Does nothing for other methods.

    Raises:
        DartreeConfigError: naming the feature, why, and what to do.
    """
    if not getattr(vllm_config.speculative_config, "is_dartree", False):
        return
    if not vllm_config.use_v2_model_runner:
        check_runner()
        missing = vllm_config._get_v2_model_runner_unsupported_features()
        raise DartreeConfigError(
            f"vLLM takes its V1 model runner, since V2 has no {', '.join(missing)}, but method 'dartree' needs V2; "
            "leave that out"
        )
    check_features(vllm_config)
    speculative, budget = vllm_config.speculative_config, vllm_config.scheduler_config.max_num_batched_tokens
    needed = tokens_of_a_round(speculative)
    if budget < needed:
        logger.warning(
            "max_num_batched_tokens is %d, but a request with a whole tree takes %d of them (its %d rows and the slots "
            "of the drafter's block), so that trees are cut or left out; raise it to that times the requests at once",
            budget,
            needed,
            speculative.num_speculative_tokens + 1,
        )


def tokens_of_a_round(speculative_config: Any) -> int:
    """Tokens of ``max_num_batched_tokens`` that vLLM's scheduler takes for one request with a whole tree."""
    return speculative_config.num_speculative_tokens + 1 + speculative_config.max_num_new_slots_for_drafting


def check_target_class(vllm_config: VllmConfig) -> None:
    """Refuses a target whose class in vLLM does not hand out hidden states; only a worker may import the class.

    Raises:
        DartreeConfigError: naming the class.
    """
    from vllm.model_executor.model_loader import get_model_architecture
    from vllm.model_executor.models.interfaces import supports_eagle3

    target, name = get_model_architecture(vllm_config.model_config)
    if not supports_eagle3(target):
        raise DartreeConfigError(
            f"method 'dartree' does not work with the target's architecture {name}: its drafters read hidden states of "
            f"the target's layers, which vLLM's {target.__name__} does not hand out (SupportsEagle3); {_OTHER_TARGET}"
        )
