"""Commit: keys, values and drafter features of the accepted path become contiguous behind the context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from vllm_dartree.engine.kv_layout import KVLayout
from vllm_dartree.engine.state import TreeStep
from vllm_dartree.kernels import use_triton
from vllm_dartree.kernels.verify_rows import path_tokens, path_tokens_torch

if TYPE_CHECKING:  # so that the benchmark of a round runs without vLLM
    from vllm.model_executor.layers.attention import Attention


@dataclass
class CachedLayer:
    """A layer of the target that owns a KV cache."""

    name: str
    attention: Attention  # its ``kv_cache`` is bound after the layer is made
    layout: KVLayout


def commit_rows(
    step: TreeStep,
    layers: list[CachedLayer],
    slot_mappings: dict[str, Tensor],
    positions: Tensor,
    aux_hidden_states: list[Tensor] | None,
) -> list[Tensor] | None:
    """Moves the row that was accepted at depth ``d`` to the place of row ``d``.

    Args:
        step: with ``accepted`` set by the sampler.
        layers: the target's; each moves by the slot mapping of its own KV group.
        slot_mappings: by layer name, ``[num_tokens]`` cache slots of the flat batch in sequential order.
        positions: the batch's buffer; goes back to sequential positions, which the drafter counts on.
        aux_hidden_states: per layer ``[num_tokens, H]``.

    Returns:
        ``aux_hidden_states`` in the order of the chain.
    """
    num_tokens = (positions if aux_hidden_states is None else aux_hidden_states[0]).shape[0]
    locate = path_tokens if use_triton(positions.device) else path_tokens_torch
    where = step.tokens, step.bounds, step.roots, positions
    source, destination, order = locate(step.accepted.path, *where, num_tokens)
    groups: dict[tuple, list[CachedLayer]] = {}
    for layer in layers:
        cache = layer.attention.kv_cache
        # Layers of one KV group share their slot mapping.
        groups.setdefault((id(slot_mappings[layer.name]), cache.stride(), cache.dtype), []).append(layer)
    for group in groups.values():
        slots = slot_mappings[group[0].name]
        caches = [layer.attention.kv_cache for layer in group]
        group[0].layout.move(caches, slots[source].where(source >= 0, -1), slots[destination])
    return None if aux_hidden_states is None else [hidden[order] for hidden in aux_hidden_states]
