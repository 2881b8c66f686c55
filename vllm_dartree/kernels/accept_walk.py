"""The walk along the target's own choices, all depths at once."""

# ruff: noqa: N803 - Triton's compile-time arguments are written in capitals.

import torch
import triton
import triton.language as tl
from torch import Tensor


def accept_walk(
    tokens: Tensor,
    parents: Tensor,
    ancestors: Tensor,
    depths: Tensor,
    target_tokens: Tensor,
    num_nodes: Tensor,
    max_depth: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The path from the anchor along nodes that carry the token which the target chose at their parent.

    A node is on it exactly if it and all its ancestors do; since siblings differ, there is at most one per depth.

    Args:
        tokens: ``[R, B]`` int64.
        parents: ``[R, B + 1]`` int64.
        ancestors: ``[R, B + 1, B + 1]`` bool.
        depths: ``[R, B + 1]`` int64.
        target_tokens: ``[R, B + 1]`` int64.
        num_nodes: ``[R]`` int64, the first ones of each request that were verified.
        max_depth: ``D``, an upper bound of the depth.

    Returns:
        Rows of the path by depth ``[R, D + 1]``, the target's tokens on it ``[R, D + 1]``, both -1 past its end, and
        the number of its nodes ``[R]``; all int64.
    """
    num_requests, num_rows = parents.shape
    path, emitted = (parents.new_empty(num_requests, max_depth + 1) for _ in range(2))
    num_accepted = parents.new_empty(num_requests)
    _accept_walk_kernel[(num_requests,)](
        tokens,
        parents,
        ancestors.view(torch.uint8),
        depths,
        target_tokens,
        num_nodes,
        path,
        emitted,
        num_accepted,
        max_depth,
        num_rows,
        tokens.stride(0),
        parents.stride(0),
        *ancestors.stride()[:2],
        depths.stride(0),
        target_tokens.stride(0),
        PADDED_ROWS=triton.next_power_of_2(num_rows),
        PADDED_DEPTH=triton.next_power_of_2(max_depth + 1),
    )
    return path, emitted, num_accepted


def accept_walk_torch(
    tokens: Tensor,
    parents: Tensor,
    ancestors: Tensor,
    depths: Tensor,
    target_tokens: Tensor,
    num_nodes: Tensor,
    max_depth: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """``accept_walk`` in PyTorch."""
    num_requests, num_rows = parents.shape
    rows = torch.arange(num_rows, device=parents.device)
    usable = (parents[:, 1:] >= 0) & (rows[1:] <= num_nodes[:, None])
    follows = torch.ones_like(parents, dtype=torch.bool)
    follows[:, 1:] = usable & (tokens == target_tokens.gather(1, parents[:, 1:].clamp(min=0)))
    on_path = (follows[:, None] | ~ancestors).all(-1)  # [R, B + 1]
    # Rows off the path are written to a last column that is cut off.
    depth = depths.where(on_path, max_depth + 1)
    path = parents.new_full((num_requests, max_depth + 2), -1)
    path = path.scatter(1, depth, rows.expand(num_requests, -1))[:, :-1]
    emitted = target_tokens.gather(1, path.clamp(min=0)).where(path >= 0, -1)
    return path, emitted, on_path.sum(-1) - 1


# Its arguments are slices where the logits are sampled in chunks.
@triton.jit(
    do_not_specialize_on_alignment=[
        "tokens_ptr",
        "parents_ptr",
        "ancestors_ptr",
        "depths_ptr",
        "target_tokens_ptr",
        "num_nodes_ptr",
    ]
)
def _accept_walk_kernel(
    tokens_ptr,  # [R, B]
    parents_ptr,  # [R, B + 1]
    ancestors_ptr,  # [R, B + 1, B + 1] uint8
    depths_ptr,  # [R, B + 1]
    target_tokens_ptr,  # [R, B + 1]
    num_nodes_ptr,  # [R]
    path_ptr,  # [R, D + 1]
    emitted_ptr,  # [R, D + 1]
    num_accepted_ptr,  # [R]
    max_depth,
    num_rows,
    tokens_stride,
    parents_stride,
    ancestors_stride_request,
    ancestors_stride_row,
    depths_stride,
    target_tokens_stride,
    PADDED_ROWS: tl.constexpr,
    PADDED_DEPTH: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    tokens_ptr += request * tokens_stride
    parents_ptr += request * parents_stride
    target_tokens_ptr += request * target_tokens_stride
    ancestors_ptr += request * ancestors_stride_request
    num_nodes = tl.load(num_nodes_ptr + request)
    row = tl.arange(0, PADDED_ROWS)
    inside = row < num_rows
    # A row is off the path if it strays itself or has an ancestor that does.
    strays = tl.zeros([PADDED_ROWS], dtype=tl.int32)
    for start in range(0, num_rows, 16):
        node = start + tl.arange(0, 16)
        verified = (node > 0) & (node < num_rows) & (node <= num_nodes)
        parent = tl.load(parents_ptr + node, mask=verified, other=-1)
        usable = verified & (parent >= 0)
        token = tl.load(tokens_ptr + node - 1, mask=usable, other=-1)
        chosen = tl.load(target_tokens_ptr + parent, mask=usable, other=0)
        wrong = (node > 0) & ~(usable & (token == chosen))
        is_ancestor = tl.load(
            ancestors_ptr + row[:, None] * ancestors_stride_row + node[None, :],
            mask=inside[:, None] & (node < num_rows)[None, :],
            other=0,
        )
        strays += tl.sum(((is_ancestor != 0) & wrong[None, :]).to(tl.int32), 1)
    on_path = inside & (strays == 0)
    num_accepted = tl.sum(on_path.to(tl.int32), 0) - 1
    depth = tl.load(depths_ptr + request * depths_stride + row, mask=on_path, other=0)
    path_ptr += request * (max_depth + 1)
    emitted_ptr += request * (max_depth + 1)
    tl.store(path_ptr + depth, row, mask=on_path)
    tl.store(emitted_ptr + depth, tl.load(target_tokens_ptr + row, mask=on_path, other=0), mask=on_path)
    step = tl.arange(0, PADDED_DEPTH)
    past = (step > num_accepted) & (step <= max_depth)
    tl.store(path_ptr + step, -1, mask=past)
    tl.store(emitted_ptr + step, -1, mask=past)
    tl.store(num_accepted_ptr + request, num_accepted)
