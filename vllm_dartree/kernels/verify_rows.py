"""The verify rows of a step: where they stand and what they see before the forward, and where they go after it.

``N`` rows of ``R`` requests, each request's after one another; row ``i`` of a request is its anchor (0) or its node
``i``. A flat batch of tokens holds them, maybe behind the rest of a prompt.
"""

# ruff: noqa: N803 - Triton's compile-time arguments are written in capitals.

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE_ROWS = 16


class Rows(NamedTuple):
    """The fields of the engine's ``TreeStep`` of the same names."""

    requests: Tensor  # [N] int64
    rows: Tensor  # [N] int64
    roots: Tensor  # [R] int64
    num_nodes: Tensor  # [R] int64
    parents: Tensor  # [R, B + 1] int64
    depths: Tensor  # [R, B + 1] int64
    ancestors: Tensor  # [R, B + 1, B + 1] bool


def begin_rows(
    positions: Tensor,
    tokens: Tensor,
    bounds: Tensor,
    slots: Tensor,
    prefill_len: Tensor,
    all_parents: Tensor,
    all_depths: Tensor,
    all_ancestors: Tensor,
) -> Rows:
    """Reads the trees of a step, and moves its rows to the positions of their depth in place.

    Args:
        positions: ``[num_tokens]`` int64, sequential as yet.
        tokens: ``[N]`` int64, where the rows stand in the flat batch.
        bounds: ``[R + 1]`` int64, where each request's rows begin among the ``N``, and ``N``.
        slots: ``[R]``, the requests' slots.
        prefill_len: by slot; a request whose anchor lies below it has no node that can be walked.
        all_parents: ``[S, B + 1]`` int64, by slot, like the next two.
        all_depths: ``[S, B + 1]`` int64.
        all_ancestors: ``[S, B + 1, B + 1]`` bool.
    """
    num_requests, max_rows = slots.shape[0], all_parents.shape[1]
    # Tensors of their own, all aligned: Triton would compile a kernel anew for views that are not.
    requests, rows = torch.empty_like(tokens), torch.empty_like(tokens)
    roots, num_nodes = tokens.new_empty(num_requests), tokens.new_empty(num_requests)
    parents, depths = (tokens.new_empty(num_requests, max_rows) for _ in range(2))
    ancestors = all_ancestors.new_empty(num_requests, max_rows, max_rows)
    _begin_rows_kernel[(triton.cdiv(max_rows, _TILE_ROWS), num_requests)](
        positions,
        tokens,
        bounds,
        slots,
        prefill_len,
        all_parents,
        all_depths,
        all_ancestors.view(torch.uint8),
        requests,
        rows,
        roots,
        num_nodes,
        parents,
        depths,
        ancestors.view(torch.uint8),
        max_rows,
        PADDED_ROWS=triton.next_power_of_2(max_rows),
        TILE_ROWS=_TILE_ROWS,
    )
    return Rows(requests, rows, roots, num_nodes, parents, depths, ancestors)


def begin_rows_torch(
    positions: Tensor,
    tokens: Tensor,
    bounds: Tensor,
    slots: Tensor,
    prefill_len: Tensor,
    all_parents: Tensor,
    all_depths: Tensor,
    all_ancestors: Tensor,
) -> Rows:
    """``begin_rows`` in PyTorch."""
    num_rows, place = bounds.diff(), torch.arange(slots.shape[0], device=tokens.device)
    requests = torch.repeat_interleave(place, num_rows, output_size=tokens.shape[0])
    rows = torch.arange(tokens.shape[0], device=tokens.device) - bounds[requests]
    roots = positions[tokens[bounds[:-1]]]
    num_nodes = (num_rows - 1).where(roots >= prefill_len[slots], 0)
    depths = all_depths[slots]
    by_depth = depths[requests, rows].where(rows <= num_nodes[requests], rows)
    positions[tokens] = roots[requests] + by_depth
    return Rows(requests, rows, roots, num_nodes, all_parents[slots], depths, all_ancestors[slots])


def path_tokens(
    path: Tensor, tokens: Tensor, bounds: Tensor, roots: Tensor, positions: Tensor, num_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    """From the rows of an accepted path to tokens of the flat batch; puts positions back in sequence.

    Args:
        path: ``[R, D + 1]`` int64, rows by depth, -1 past its end.
        tokens: ``[N]`` int64.
        bounds: ``[R + 1]`` int64.
        roots: ``[R]`` int64.
        positions: ``[num_tokens]`` int64 or longer, changed in place.
        num_tokens: of the flat batch.

    Returns:
        The token accepted at each depth and the one whose place it takes, both ``[R, D + 1]`` and -1 past the path;
        and ``[num_tokens]``, for each place the token that belongs there; all int64.
    """
    source, destination = torch.empty_like(path), torch.empty_like(path)
    order = torch.arange(num_tokens, device=path.device)
    _path_tokens_kernel[(path.shape[0],)](
        path.contiguous(),
        tokens,
        bounds,
        roots,
        positions,
        source,
        destination,
        order,
        path.shape[1],
        PADDED_PATH=triton.next_power_of_2(path.shape[1]),
        TILE_ROWS=64,
    )
    return source, destination, order


def path_tokens_torch(
    path: Tensor, tokens: Tensor, bounds: Tensor, roots: Tensor, positions: Tensor, num_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    """``path_tokens`` in PyTorch."""
    last = tokens.shape[0] - 1
    depths = torch.arange(path.shape[1], device=path.device)
    # A request has a row ``d`` wherever its path reaches depth ``d``.
    source = tokens[bounds[:-1, None] + path.clamp(min=0)].where(path >= 0, -1)
    destination = tokens[(bounds[:-1, None] + depths).clamp(max=last)].where(path >= 0, -1)
    place = torch.arange(path.shape[0], device=path.device)
    requests = torch.repeat_interleave(place, bounds.diff(), output_size=tokens.shape[0])
    rows = torch.arange(tokens.shape[0], device=path.device) - bounds[requests]
    positions[tokens] = roots[requests] + rows
    # Past its end a path keeps the token of its anchor where it is.
    order = torch.arange(num_tokens, device=path.device)
    order[destination.where(path >= 0, destination[:, :1])] = source.where(path >= 0, source[:, :1])
    return source, destination, order


@triton.jit
def _begin_rows_kernel(
    positions_ptr,  # [num_tokens]
    tokens_ptr,  # [N]
    bounds_ptr,  # [R + 1]
    slots_ptr,  # [R]
    prefill_len_ptr,  # [S]
    all_parents_ptr,  # [S, B + 1]
    all_depths_ptr,  # [S, B + 1]
    all_ancestors_ptr,  # [S, B + 1, B + 1] uint8
    requests_ptr,  # [N]
    rows_ptr,  # [N]
    roots_ptr,  # [R]
    num_nodes_ptr,  # [R]
    parents_ptr,  # [R, B + 1]
    depths_ptr,  # [R, B + 1]
    ancestors_ptr,  # [R, B + 1, B + 1] uint8
    max_rows,
    PADDED_ROWS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    request = tl.program_id(1).to(tl.int64)
    first = tl.load(bounds_ptr + request)
    num_rows = tl.load(bounds_ptr + request + 1) - first
    slot = tl.load(slots_ptr + request).to(tl.int64)
    root = tl.load(positions_ptr + tl.load(tokens_ptr + first))
    num_nodes = tl.where(root >= tl.load(prefill_len_ptr + slot), num_rows - 1, 0)
    if tl.program_id(0) == 0:
        tl.store(roots_ptr + request, root)
        tl.store(num_nodes_ptr + request, num_nodes)
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = tl.arange(0, PADDED_ROWS)
    inside, exists = row < max_rows, row < num_rows
    depth = tl.load(all_depths_ptr + slot * max_rows + row, mask=inside, other=0)
    tl.store(depths_ptr + request * max_rows + row, depth, mask=inside)
    tl.store(
        parents_ptr + request * max_rows + row,
        tl.load(all_parents_ptr + slot * max_rows + row, mask=inside, other=0),
        mask=inside,
    )
    tl.store(requests_ptr + first + row, request, mask=exists)
    tl.store(rows_ptr + first + row, row, mask=exists)
    token = tl.load(tokens_ptr + first + row, mask=exists, other=0)
    # The anchor stays where it is: other programs may still have to read its position.
    tl.store(positions_ptr + token, root + tl.where(row <= num_nodes, depth, row), mask=exists & (row > 0))
    place = row[:, None] * max_rows + column[None, :]
    present = inside[:, None] & (column < max_rows)[None, :]
    size = max_rows.to(tl.int64) * max_rows
    ancestors = tl.load(all_ancestors_ptr + slot * size + place, mask=present, other=0)
    tl.store(ancestors_ptr + request * size + place, ancestors, mask=present)


@triton.jit
def _path_tokens_kernel(
    path_ptr,  # [R, path_length]
    tokens_ptr,  # [N]
    bounds_ptr,  # [R + 1]
    roots_ptr,  # [R]
    positions_ptr,  # [num_tokens]
    source_ptr,  # [R, path_length]
    destination_ptr,  # [R, path_length]
    order_ptr,  # [num_tokens], every token's own place
    path_length,
    PADDED_PATH: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    first = tl.load(bounds_ptr + request)
    num_rows = tl.load(bounds_ptr + request + 1) - first
    root = tl.load(roots_ptr + request)
    for start in range(0, num_rows, TILE_ROWS):
        row = start + tl.arange(0, TILE_ROWS)
        token = tl.load(tokens_ptr + first + row, mask=row < num_rows, other=0)
        tl.store(positions_ptr + token, root + row, mask=row < num_rows)
    depth = tl.arange(0, PADDED_PATH)
    row = tl.load(path_ptr + request * path_length + depth, mask=depth < path_length, other=-1)
    on_path = row >= 0
    source = tl.load(tokens_ptr + first + row, mask=on_path, other=-1)
    destination = tl.load(tokens_ptr + first + depth, mask=on_path, other=-1)
    tl.store(source_ptr + request * path_length + depth, source, mask=depth < path_length)
    tl.store(destination_ptr + request * path_length + depth, destination, mask=depth < path_length)
    tl.store(order_ptr + destination, source, mask=on_path)
