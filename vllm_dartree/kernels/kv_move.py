"""Moving single slots of paged KV caches."""

# ruff: noqa: N803 - Triton's compile-time arguments are written in capitals.

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

# Elements that one program holds between reading and writing; more would spill registers.
_MAX_TILE = 8192


def move_slots(kv_caches: Sequence[Tensor], source: Tensor, destination: Tensor) -> None:
    """Copies slots to slots in all caches at once, a slot being ``block * block_size + offset``.

    Within a group (a request's path, say) all slots are read before one is written, so sources and destinations may
    overlap. Groups must not touch each other's slots. Where nothing moves, nothing is read.

    Args:
        kv_caches: of the layers that share the slots, each ``[num_blocks, num_kv_heads, block_size, C]``; any strides
            but the last, the same for all; changed in place.
        source: ``[G, P]`` int64, ``P`` slots of each of ``G`` groups; ``[P]`` is one group.
        destination: as ``source``. A pair with a negative slot is skipped.

    Raises:
        ValueError: the content of a slot and head is not contiguous, or the caches are not alike.
    """
    first = kv_caches[0]
    if first.stride(-1) != 1:
        raise ValueError(f"a head of the cache must be contiguous, but has strides {first.stride()}")
    for cache in kv_caches:
        if (cache.stride(), cache.dtype) != (first.stride(), first.dtype):
            raise ValueError(
                f"caches moved together must be alike, but one is {cache.dtype} with strides {cache.stride()} and one "
                f"{first.dtype} with strides {first.stride()}"
            )
    num_groups, path = source.shape if source.ndim == 2 else (1, source.shape[0])
    _, num_kv_heads, block_size, content = first.shape
    padded_path = triton.next_power_of_2(path)
    tile = max(1, min(triton.next_power_of_2(content), _MAX_TILE // padded_path))
    _move_slots_kernel[(triton.cdiv(content, tile) * num_kv_heads, len(kv_caches), num_groups)](
        first,
        _addresses(tuple(cache.data_ptr() for cache in kv_caches), first.device),
        source.contiguous(),
        destination.contiguous(),
        path,
        *first.stride()[:3],
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_SIZE=block_size,
        CONTENT=content,
        PADDED_PATH=padded_path,
        TILE=tile,
    )


@functools.lru_cache(maxsize=64)
def _addresses(pointers: tuple[int, ...], device: torch.device) -> Tensor:
    """``[num_caches]`` int64 on the device, copied there once: vLLM binds caches when it starts and leaves them."""
    with torch.inference_mode(False):
        return torch.tensor(pointers, dtype=torch.int64, device=device)


def move_slots_torch(kv_caches: Sequence[Tensor], source: Tensor, destination: Tensor) -> None:
    """``move_slots`` in PyTorch; it reads the slots of all groups before it writes one."""
    source, destination = source.flatten(), destination.flatten()
    # A skipped pair copies slot 0, which lies in the null block, onto itself.
    moves = (source >= 0) & (destination >= 0)
    source, destination = source.where(moves, 0), destination.where(moves, 0)
    for cache in kv_caches:
        block_size = cache.shape[2]
        read = cache[source // block_size, :, source % block_size]  # [G * P, num_kv_heads, C]
        cache[destination // block_size, :, destination % block_size] = read


@triton.jit
def _move_slots_kernel(
    cache_ptr,  # [num_blocks, NUM_KV_HEADS, BLOCK_SIZE, CONTENT], the first cache: tells the type of all
    addresses_ptr,  # [num_caches]
    source_ptr,  # [G, path]
    destination_ptr,  # [G, path]
    path,
    stride_block,
    stride_head,
    stride_slot,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CONTENT: tl.constexpr,
    PADDED_PATH: tl.constexpr,
    TILE: tl.constexpr,
):
    step = tl.arange(0, PADDED_PATH)
    pair = tl.program_id(2) * path + step
    source = tl.load(source_ptr + pair, mask=step < path, other=-1).to(tl.int64)
    destination = tl.load(destination_ptr + pair, mask=step < path, other=-1).to(tl.int64)
    moves = (source >= 0) & (destination >= 0) & (source != destination)
    # A path that is contiguous already costs nothing.
    if tl.max(moves.to(tl.int32), 0) == 0:
        return
    head = tl.program_id(0) % NUM_KV_HEADS
    element = tl.program_id(0) // NUM_KV_HEADS * TILE + tl.arange(0, TILE)
    cache_ptr = tl.load(addresses_ptr + tl.program_id(1)).to(cache_ptr.dtype) + head.to(tl.int64) * stride_head
    moved = moves[:, None] & (element < CONTENT)[None, :]
    source = source // BLOCK_SIZE * stride_block + source % BLOCK_SIZE * stride_slot
    destination = destination // BLOCK_SIZE * stride_block + destination % BLOCK_SIZE * stride_slot
    content = tl.load(cache_ptr + source[:, None] + element[None, :], mask=moved)
    # Another warp of this program may still have to read what this one is about to write.
    tl.debug_barrier()
    tl.store(cache_ptr + destination[:, None] + element[None, :], content, mask=moved)
