"""Deferred best-first pruning: the rows of the nodes with the highest keys."""

# ruff: noqa: N803 - Triton's compile-time arguments are written in capitals.

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor


def best_rows(
    tokens: Tensor, parents: Tensor, depths: Tensor, scores: Tensor, budget: int, depth_bonus: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Keeps the ``budget`` nodes with the highest ``score + depth_bonus * depth``; ties go to the lower index.

    Args:
        tokens: ``[R, N]`` int64.
        parents: ``[R, N]`` int64, index among the ``N`` nodes, -1: the anchor.
        depths: ``[N]`` int64.
        scores: ``[R, N]`` float32; -inf for a node that cannot be.
        budget: ``B``.
        depth_bonus: at most 0, so that a node is never kept without its parent.

    Returns:
        Tokens ``[R, B]``, parents ``[R, B + 1]`` as rows, and scores ``[R, B]``; dead nodes have 0, -1 and -inf.
    """
    num_requests, num_nodes = tokens.shape
    kept_tokens, kept_scores = tokens.new_empty(num_requests, budget), scores.new_empty(num_requests, budget)
    rows = parents.new_empty(num_requests, budget + 1)
    _best_rows_kernel[(num_requests,)](
        tokens,
        parents,
        depths,
        scores,
        kept_tokens,
        rows,
        kept_scores,
        depth_bonus,
        num_nodes,
        budget,
        tokens.stride(0),
        parents.stride(0),
        scores.stride(0),
        PADDED_NODES=triton.next_power_of_2(num_nodes),
        PADDED_ROWS=triton.next_power_of_2(budget + 1),
        # A fused multiply-add would round keys otherwise than the twin does.
        enable_fp_fusion=False,
    )
    return kept_tokens, rows, kept_scores


def best_rows_torch(
    tokens: Tensor, parents: Tensor, depths: Tensor, scores: Tensor, budget: int, depth_bonus: float
) -> tuple[Tensor, Tensor, Tensor]:
    """``best_rows`` in PyTorch."""
    num_requests, num_nodes = tokens.shape
    kept = min(budget, num_nodes)
    order = (scores + depth_bonus * depths).sort(dim=-1, descending=True, stable=True).indices
    chosen = order[:, :kept]
    kept_scores = scores.gather(1, chosen)
    dead = kept_scores == float("-inf")
    # Row of every node, shifted by one so that the anchor's index -1 finds row 0.
    rows = parents.new_zeros(num_requests, num_nodes + 1)
    rows.scatter_(1, chosen + 1, torch.arange(1, kept + 1, device=rows.device).expand(num_requests, -1))
    kept_parents = rows.gather(1, parents.gather(1, chosen) + 1).masked_fill(dead, -1)
    spare = budget - kept
    return (
        F.pad(tokens.gather(1, chosen).masked_fill(dead, 0), (0, spare)),
        F.pad(F.pad(kept_parents, (1, 0)), (0, spare), value=-1),
        F.pad(kept_scores, (0, spare), value=float("-inf")),
    )


@triton.jit
def _best_rows_kernel(
    tokens_ptr,  # [R, N]
    parents_ptr,  # [R, N]
    depths_ptr,  # [N]
    scores_ptr,  # [R, N]
    kept_tokens_ptr,  # [R, B]
    rows_ptr,  # [R, B + 1]
    kept_scores_ptr,  # [R, B]
    depth_bonus,
    num_nodes,
    budget,
    tokens_stride,
    parents_stride,
    scores_stride,
    PADDED_NODES: tl.constexpr,
    PADDED_ROWS: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    scores_ptr += request * scores_stride
    node = tl.arange(0, PADDED_NODES)
    exists = node < num_nodes
    score = tl.load(scores_ptr + node, mask=exists, other=float("-inf"))
    key = score + depth_bonus * tl.load(depths_ptr + node, mask=exists, other=0).to(tl.float32)
    # A node's place in the order is the number of nodes before it; nothing has to be sorted for that.
    place = tl.zeros([PADDED_NODES], dtype=tl.int32)
    for start in range(0, num_nodes, 16):
        other = start + tl.arange(0, 16)
        compared = other < num_nodes
        other_score = tl.load(scores_ptr + other, mask=compared, other=float("-inf"))
        other_key = other_score + depth_bonus * tl.load(depths_ptr + other, mask=compared, other=0).to(tl.float32)
        before = (other_key[None, :] > key[:, None]) | (
            (other_key[None, :] == key[:, None]) & (other[None, :] < node[:, None])
        )
        place += tl.sum((before & compared[None, :]).to(tl.int32), 1)
    kept = exists & (place < budget)
    dead = score == float("-inf")
    parent = tl.load(parents_ptr + request * parents_stride + node, mask=exists, other=-1)
    row_of_parent = tl.where(parent < 0, 0, tl.gather(place, tl.maximum(parent, 0).to(tl.int32), 0) + 1)
    token = tl.load(tokens_ptr + request * tokens_stride + node, mask=exists, other=0)
    kept_tokens_ptr += request * budget
    kept_scores_ptr += request * budget
    rows_ptr += request * (budget + 1)
    tl.store(kept_tokens_ptr + place, tl.where(dead, 0, token), mask=kept)
    tl.store(kept_scores_ptr + place, score, mask=kept)
    tl.store(rows_ptr + place + 1, tl.where(dead, -1, row_of_parent), mask=kept)
    # The anchor's row, and the rows that there is no node for.
    row = tl.arange(0, PADDED_ROWS)
    spare = (row > num_nodes) & (row <= budget)
    tl.store(rows_ptr + row, tl.where(row == 0, 0, -1), mask=spare | (row == 0))
    tl.store(kept_tokens_ptr + row - 1, 0, mask=spare)
    tl.store(kept_scores_ptr + row - 1, float("-inf"), mask=spare)
