"""From the parents of a tree to all that the next step reads of it, by request slot."""

# ruff: noqa: N803 - Triton's compile-time arguments are written in capitals.

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE_ROWS = 16


def plant(
    tokens: Tensor,
    parents: Tensor,
    slots: Tensor,
    as_chain: Tensor,
    max_depth: int,
    all_parents: Tensor,
    all_depths: Tensor,
    all_ancestors: Tensor,
) -> Tensor:
    """Writes parents, depths and ancestors of ``R`` trees to their slots.

    Trees of slots in ``as_chain`` are reduced to their *spine* first: from the anchor on, always the best child. It has
    parents 0, 1, 2, ..., then dead nodes.

    Args:
        tokens: ``[R, B]`` int64.
        parents: ``[R, B + 1]`` int64, parents before children.
        slots: ``[R]`` int64; -1 is padding, which goes to the last slot.
        as_chain: ``[S]`` bool.
        max_depth: an upper bound of the depth.
        all_parents: ``[S, B + 1]`` int64, written here, like the next two.
        all_depths: ``[S, B + 1]`` int64.
        all_ancestors: ``[S, B + 1, B + 1]`` bool.

    Returns:
        ``[R, B]`` int64, the tokens as they will be verified.
    """
    num_requests, num_rows = parents.shape
    planted = torch.empty_like(tokens, memory_format=torch.contiguous_format)
    _plant_kernel[(triton.cdiv(num_rows, _TILE_ROWS), num_requests)](
        tokens,
        parents,
        slots,
        as_chain.view(torch.uint8),
        planted,
        all_parents,
        all_depths,
        all_ancestors.view(torch.uint8),
        max_depth,
        all_parents.shape[0] - 1,
        num_rows,
        slots.stride(0),
        tokens.stride(0),
        parents.stride(0),
        PADDED_ROWS=triton.next_power_of_2(num_rows),
        TILE_ROWS=_TILE_ROWS,
    )
    return planted


def plant_torch(
    tokens: Tensor,
    parents: Tensor,
    slots: Tensor,
    as_chain: Tensor,
    max_depth: int,
    all_parents: Tensor,
    all_depths: Tensor,
    all_ancestors: Tensor,
) -> Tensor:
    """``plant`` in PyTorch."""
    slots = slots.where(slots >= 0, all_parents.shape[0] - 1)
    depths, ancestors = topology_torch(parents, max_depth)
    rows = torch.arange(parents.shape[1], device=parents.device)
    # Rows stand in descending order of their keys, and siblings share their depth: the first child is the best.
    siblings = parents[:, :, None] == parents[:, None, :]
    has_better = (siblings & (rows[:, None] > rows) & (rows > 0)).any(-1)
    on_spine = ((~has_better & (parents >= 0))[:, None] | ~ancestors).all(-1)  # [R, B + 1]
    order = (~on_spine).to(torch.int8).argsort(dim=1, stable=True)
    alive = rows < on_spine.sum(1, keepdim=True)
    # What a chain looks like is known without looking at it.
    is_causal = (rows <= rows[:, None]) & alive[:, :, None] | (rows == rows[:, None])
    chain = as_chain[slots][:, None]
    all_parents[slots] = torch.where(chain, (rows - 1).clamp(min=0).where(alive, -1), parents)
    all_depths[slots] = torch.where(chain, rows.where(alive, 0), depths)
    all_ancestors[slots] = torch.where(chain[..., None], is_causal, ancestors)
    return torch.where(chain, tokens.gather(1, order[:, 1:] - 1).where(alive[:, 1:], 0), tokens)


def topology_torch(parents: Tensor, max_depth: int) -> tuple[Tensor, Tensor]:
    """Depths and ancestors in ``log2(max_depth)`` steps, whatever the order of the nodes.

    Args:
        parents: ``[R, B + 1]`` int64.
        max_depth: an upper bound of the depth.

    Returns:
        ``[R, B + 1]`` int64 and ``[R, B + 1, B + 1]`` bool, each row itself included.
    """
    num_rows = parents.shape[1]
    # After n steps `ancestors` holds those less than 2**n levels up, and `up` is the row 2**n levels up, or -1.
    ancestors = torch.eye(num_rows, dtype=torch.bool, device=parents.device).expand(parents.shape[0], -1, -1)
    up = torch.nn.functional.pad(parents[:, 1:], (1, 0), value=-1)
    for _ in range(max_depth.bit_length()):
        above = up.clamp(min=0)
        reaches = (up >= 0)[..., None]
        ancestors = ancestors | (ancestors.gather(1, above[..., None].expand_as(ancestors)) & reaches)
        up = up.gather(1, above).where(up >= 0, -1)
    return ancestors.sum(-1) - 1, ancestors


@triton.jit
def _plant_kernel(
    tokens_ptr,  # [R, B]
    parents_ptr,  # [R, B + 1]
    slots_ptr,  # [R]
    as_chain_ptr,  # [S] uint8
    planted_ptr,  # [R, B]
    all_parents_ptr,  # [S, B + 1]
    all_depths_ptr,  # [S, B + 1]
    all_ancestors_ptr,  # [S, B + 1, B + 1] uint8
    max_depth,
    last_slot,
    num_rows,
    slots_stride,
    tokens_stride,
    parents_stride,
    PADDED_ROWS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    request = tl.program_id(1).to(tl.int64)
    tokens_ptr += request * tokens_stride
    parents_ptr += request * parents_stride
    slot = tl.load(slots_ptr + request * slots_stride).to(tl.int64)
    slot = tl.where(slot >= 0, slot, last_slot)
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = tl.arange(0, PADDED_ROWS)
    inside = row < num_rows
    parent = tl.load(parents_ptr + row, mask=inside, other=-1).to(tl.int32)
    node = row  # the row that a token comes from; 0 for none
    if tl.load(as_chain_ptr + slot) != 0:
        all_parents = tl.load(parents_ptr + column, mask=column < num_rows, other=-1).to(tl.int32)
        all_parents = tl.where(column == 0, -1, all_parents)
        length = 0
        last = 0
        node = row * 0
        for depth in range(1, max_depth + 1):
            # Past the spine's end, -2 is nobody's parent.
            child = tl.min(tl.where(all_parents == last, column, PADDED_ROWS), 0)
            found = child < PADDED_ROWS
            length += found.to(tl.int32)
            last = tl.where(found, child, -2)
            node = tl.where((row == depth) & found, child, node)
        parent = tl.where(row <= length, tl.maximum(row - 1, 0), -1)
        depths = tl.where(row <= length, row, 0)
        ancestors = (column[None, :] <= depths[:, None]) & (depths > 0)[:, None]
    else:
        depths = row * 0
        ancestors = column[None, :] < 0
        ancestors = ancestors & (row >= 0)[:, None]
        up = tl.where(row == 0, -1, parent)
        for _ in range(max_depth):
            ancestors = ancestors | (column[None, :] == up[:, None])
            depths += (up >= 0).to(tl.int32)
            # Nothing is above the anchor.
            up = tl.load(parents_ptr + up, mask=up > 0, other=-1).to(tl.int32)
        node = tl.where(parent >= 0, row, 0)
    ancestors = ancestors | (column[None, :] == row[:, None])
    token = tl.load(tokens_ptr + node - 1, mask=inside & (node > 0), other=0)
    tl.store(planted_ptr + request * (num_rows - 1) + row - 1, token, mask=inside & (row > 0))
    tl.store(all_parents_ptr + slot * num_rows + row, parent, mask=inside)
    tl.store(all_depths_ptr + slot * num_rows + row, depths, mask=inside)
    tl.store(
        all_ancestors_ptr + (slot * num_rows + row[:, None]) * num_rows + column[None, :],
        ancestors.to(tl.uint8),
        mask=inside[:, None] & (column < num_rows)[None, :],
    )
