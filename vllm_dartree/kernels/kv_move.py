"""Moving single slots of a paged KV cache."""

# ruff: noqa: N803 - Triton's compile-time arguments are written in capitals.

import triton
import triton.language as tl
from torch import Tensor

# Elements that one program holds between reading and writing; more would spill registers.
_MAX_TILE = 8192


def move_slots(kv_cache: Tensor, source: Tensor, destination: Tensor) -> None:
    """Copies slots to slots, a slot being ``block * block_size + offset``.

    Within a group (a request's path, say) all slots are read before one is written, so sources and destinations may
    overlap. Groups must not touch each other's slots.

    Args:
        kv_cache: ``[num_blocks, num_kv_heads, block_size, C]``, any strides but the last; changed in place.
        source: ``[G, P]`` int64, ``P`` slots of each of ``G`` groups; ``[P]`` is one group.
        destination: as ``source``. A pair with a negative slot is skipped.

    Raises:
        ValueError: the content of a slot and head is not contiguous.
    """
    if kv_cache.stride(-1) != 1:
        raise ValueError(f"a head of the cache must be contiguous, but has strides {kv_cache.stride()}")
    num_groups, path = source.shape if source.ndim == 2 else (1, source.shape[0])
    _, num_kv_heads, block_size, content = kv_cache.shape
    padded_path = triton.next_power_of_2(path)
    tile = max(1, min(triton.next_power_of_2(content), _MAX_TILE // padded_path))
    _move_slots_kernel[(triton.cdiv(content, tile), num_kv_heads, num_groups)](
        kv_cache,
        source.contiguous(),
        destination.contiguous(),
        path,
        *kv_cache.stride()[:3],
        BLOCK_SIZE=block_size,
        CONTENT=content,
        PADDED_PATH=padded_path,
        TILE=tile,
    )


def move_slots_torch(kv_cache: Tensor, source: Tensor, destination: Tensor) -> None:
    """``move_slots`` in PyTorch; it reads the slots of all groups before it writes one."""
    block_size = kv_cache.shape[2]
    source, destination = source.flatten(), destination.flatten()
    # A skipped pair copies slot 0, which lies in the null block, onto itself.
    moves = (source >= 0) & (destination >= 0)
    source, destination = source.where(moves, 0), destination.where(moves, 0)
    read = kv_cache[source // block_size, :, source % block_size]  # [G * P, num_kv_heads, C]
    kv_cache[destination // block_size, :, destination % block_size] = read


@triton.jit
def _move_slots_kernel(
    cache_ptr,  # [num_blocks, num_kv_heads, BLOCK_SIZE, CONTENT]
    source_ptr,  # [G, path]
    destination_ptr,  # [G, path]
    path,
    stride_block,
    stride_head,
    stride_slot,
    BLOCK_SIZE: tl.constexpr,
    CONTENT: tl.constexpr,
    PADDED_PATH: tl.constexpr,
    TILE: tl.constexpr,
):
    element = tl.program_id(0) * TILE + tl.arange(0, TILE)
    cache_ptr += tl.program_id(1).to(tl.int64) * stride_head
    step = tl.arange(0, PADDED_PATH)
    pair = tl.program_id(2) * path + step
    source = tl.load(source_ptr + pair, mask=step < path, other=-1).to(tl.int64)
    destination = tl.load(destination_ptr + pair, mask=step < path, other=-1).to(tl.int64)
    # A slot that stays where it is costs nothing.
    moves = ((source >= 0) & (destination >= 0) & (source != destination))[:, None] & (element < CONTENT)[None, :]
    source = source // BLOCK_SIZE * stride_block + source % BLOCK_SIZE * stride_slot
    destination = destination // BLOCK_SIZE * stride_block + destination % BLOCK_SIZE * stride_slot
    content = tl.load(cache_ptr + source[:, None] + element[None, :], mask=moves)
    # Another warp of this program may still have to read what this one is about to write.
    tl.debug_barrier()
    tl.store(cache_ptr + destination[:, None] + element[None, :], content, mask=moves)
