"""Depth-wise batched expansion (METHOD section 2, step 3)."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_dartree.tree.head import Branches, CorrectionHead, DraftBlock


@dataclass
class Supertree:
    """All branches that the expansion kept, ``N = sum(widths)`` nodes, depth by depth.

    A node that no candidate could fill (its path has probability zero) has score -inf.
    """

    tokens: Tensor  # [R, N] int64
    parents: Tensor  # [R, N] int64, index of the parent among the N nodes, -1: the anchor
    depths: Tensor  # [N] int64, never falling, from 1
    scores: Tensor  # [R, N] float32, log-probability of the path from the anchor


def _levels(widths: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """``[N]`` int64 each: depth of every node, and the index at which its parents' level begins."""
    depths, parents = [], []
    depth, first, first_parent = 1, 0, -1  # the anchor is a level of its own
    for width, run in itertools.groupby(widths):
        level = torch.arange(len(list(run)) * width, device=device) // width
        depths.append(level + depth)
        parents.append((first + (level - 1) * width).where(level > 0, first_parent))
        depth += level.shape[0] // width
        first += level.shape[0]
        first_parent = first - width
    return torch.cat(depths), torch.cat(parents)


def expand(head: CorrectionHead, block: DraftBlock, widths: Sequence[int]) -> Supertree:
    """Grows ``widths[d - 1]`` branches at depth ``d``, all live branches of all requests at once.

    Args:
        head: the correction head.
        block: candidates and base logits of at least ``len(widths)`` slots.
        widths: branches to keep at each depth, ``TreeConfig.widths``; each at most ``K`` times the one before
            (``K`` for the first).
    """
    prepared = head.prepare(block)
    state = head.root_state(prepared)
    scores = block.base.new_zeros(block.base.shape[0], 1)
    grown: list[Branches] = []
    for slot, width in enumerate(widths):
        if grown:
            state = head.follow(prepared, slot - 1, state, grown[-1])
        grown.append(head.grow(prepared, block, slot, state, scores, width))
        scores = grown[-1].scores
    depths, first_parents = _levels(widths, block.base.device)
    scores, parents, _, tokens = (torch.cat(levels, 1) for levels in zip(*grown, strict=True))
    return Supertree(tokens, parents + first_parents, depths, scores)
