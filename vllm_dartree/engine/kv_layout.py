"""Where the keys and values of a cache slot lie in a backend's paged cache, and what is done with them there."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vllm_dartree.kernels.kv_move import move_slots, move_slots_torch
from vllm_dartree.kernels.tree_attention import gathered_tree_attention, tree_attention, tree_attention_torch


@dataclass
class VerifyRows:
    """Where the verify rows of ``R`` requests stand in the flat batch and what they may see.

    The rows of a request follow each other, and ``R`` may count requests that pad a graph, which have no rows.
    """

    first_tokens: Tensor  # [R] int64, index of the anchor's row in the flat batch
    num_rows: Tensor  # [R] int64
    roots: Tensor  # [R] int64, position of the anchor
    ancestors: Tensor  # [R, B + 1, B + 1] bool
    depths: Tensor  # [R, B + 1] int64
    block_table: Tensor  # [R, max_blocks] int32, of the layer's KV group
    verify_only: bool  # whether the flat batch holds nothing but verify rows


class KVLayout(ABC):
    """Verifies trees on a layer's cache and moves single slots in it. A slot is ``block * block_size + offset``."""

    @abstractmethod
    def attend(
        self,
        query: Tensor,
        kv_cache: Tensor,
        out: Tensor,
        rows: VerifyRows,
        scale: float,
        sliding_window: int | None,
        soft_cap: float | None,
    ) -> None:
        """Writes the attention of the verify rows into ``out`` (``[num_tokens, num_heads, D]``, as ``query``)."""

    @abstractmethod
    def move(self, kv_caches: Sequence[Tensor], source: Tensor, destination: Tensor) -> None:
        """Copies slots ``source`` to slots ``destination`` (int64), reading all of a group before writing one.

        In the caches of all layers of a KV group, which have this layout.

        Both are ``[G, P]``, ``P`` slots of each of ``G`` requests, or ``[P]``. A pair with a negative slot is skipped.
        """


@functools.cache
def _packed_places(block_size: int, head_size: int, isa: str) -> tuple[Tensor, Tensor]:
    """Where element ``i`` of a plain tile ``[block_size, D]`` of keys, and of values, went in the packed one."""
    from vllm import _custom_ops as ops

    numbers = torch.arange(block_size * head_size, dtype=torch.float32).view(block_size, 1, head_size)
    tiles = torch.full((2, 1, 1, block_size, head_size), -1.0)
    ops.cpu_attn_reshape_and_cache(numbers, numbers, tiles[0], tiles[1], torch.arange(block_size), isa)
    keys, values = (tile.flatten().argsort().view(block_size, head_size) for tile in tiles)
    return keys, values


class PackedCPULayout(KVLayout):
    """CPU_ATTN's cache, ``[num_blocks, num_kv_heads, block_size, 2 * D]``: a tile of keys, then one of values.

    The elements of a tile are permuted in a way that depends on the instruction set, so the permutation is read off
    by writing known values through vLLM's own ``cpu_attn_reshape_and_cache``.

    Args:
        layer: vLLM's attention layer. Its ``isa`` and the size of its blocks are known only once vLLM has made the
            cache (``CPUAttentionMetadataBuilder``, ``CpuPlatform.update_block_size_for_backend``), so both are read
            where they are used.
    """

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def _packed(self, kv_cache: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Tiles ``[num_blocks, num_kv_heads, block_size * D]`` of keys and of values; and their places."""
        num_blocks, num_kv_heads, block_size, both = kv_cache.shape
        tiles = kv_cache.view(num_blocks, num_kv_heads, 2, block_size * both // 2).unbind(2)
        return tiles, _packed_places(block_size, both // 2, self.layer.isa)

    def read(self, kv_cache: Tensor, block_table: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values ``[R, num_kv_heads, num_blocks * block_size, D]`` of the blocks ``[R, num_blocks]``."""

        def plain(tiles: Tensor, places: Tensor) -> Tensor:
            gathered = tiles[block_table.long()]  # [R, num_blocks, num_kv_heads, block_size * D]
            gathered = gathered.index_select(-1, places.flatten()).unflatten(-1, places.shape)
            return gathered.transpose(1, 2).flatten(2, 3)

        (keys, values), (key_places, value_places) = self._packed(kv_cache)
        return plain(keys, key_places), plain(values, value_places)

    def attend(
        self,
        query: Tensor,
        kv_cache: Tensor,
        out: Tensor,
        rows: VerifyRows,
        scale: float,
        sliding_window: int | None,
        soft_cap: float | None,
    ) -> None:
        row = torch.arange(rows.depths.shape[1])
        exists = row < rows.num_rows[:, None]  # [R, B + 1]
        tokens = (rows.first_tokens[:, None] + row).where(exists, 0)
        attended = gathered_tree_attention(
            query[tokens],
            *self.read(kv_cache, rows.block_table),
            rows.num_rows,
            rows.roots,
            rows.ancestors,
            rows.depths,
            scale,
            sliding_window,
            soft_cap,
        )
        out[tokens[exists]] = attended[exists]

    def move(self, kv_caches: Sequence[Tensor], source: Tensor, destination: Tensor) -> None:
        source, destination = source.flatten(), destination.flatten()
        # A skipped pair copies slot 0, which lies in vLLM's null block, onto itself.
        moves = (source >= 0) & (destination >= 0)
        source, destination = source.where(moves, 0), destination.where(moves, 0)
        for kv_cache in kv_caches:
            block_size = kv_cache.shape[2]
            for tiles, places in zip(*self._packed(kv_cache), strict=True):
                read = tiles[source[:, None] // block_size, :, places[source % block_size]]  # [N, D, kv_heads]
                tiles[destination[:, None] // block_size, :, places[destination % block_size]] = read


class PagedLayout(KVLayout):
    """The cache of TRITON_ATTN, FLASH_ATTN and FLASHINFER: ``[num_blocks, num_kv_heads, block_size, 2 * D]``.

    That is the logical order of the view that vLLM binds to ``layer.kv_cache``; a slot's key and value lie side by
    side, and all other strides are free (``vllm.v1.kv_cache_layout.KVCacheLayout``).

    Args:
        use_triton: run the Triton kernels; else their PyTorch twins.
        batch_invariant: never split the context, since in how many parts depends on the size of the batch.
    """

    def __init__(self, use_triton: bool, batch_invariant: bool = False) -> None:
        self._attend = tree_attention if use_triton else tree_attention_torch
        self._move = move_slots if use_triton else move_slots_torch
        if use_triton and batch_invariant:
            self._attend = functools.partial(tree_attention, num_splits=1)

    def attend(
        self,
        query: Tensor,
        kv_cache: Tensor,
        out: Tensor,
        rows: VerifyRows,
        scale: float,
        sliding_window: int | None,
        soft_cap: float | None,
    ) -> None:
        self._attend(
            query,
            *kv_cache.chunk(2, dim=-1),
            out,
            rows.block_table,
            rows.first_tokens,
            rows.num_rows,
            rows.roots,
            rows.ancestors,
            rows.depths,
            scale,
            sliding_window,
            soft_cap,
        )

    def move(self, kv_caches: Sequence[Tensor], source: Tensor, destination: Tensor) -> None:
        self._move(kv_caches, source, destination)
