"""Depth-wise batched expansion (METHOD section 2, step 3)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vllm_dartree.tree.head import CorrectionHead, DraftBlock, select_branches


@dataclass
class Supertree:
    """All branches that the expansion kept, ``N = sum(widths)`` nodes, depth by depth.

    A node that no candidate could fill (its path has probability zero) has score -inf.
    """

    tokens: Tensor  # [R, N] int64
    parents: Tensor  # [R, N] int64, index of the parent among the N nodes, -1: the anchor
    depths: Tensor  # [N] int64, never falling, from 1
    scores: Tensor  # [R, N] float32, log-probability of the path from the anchor


def best_first(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The ``count`` largest of the last dimension, descending; ties keep their order, which ``torch.topk`` does not."""
    ordered, index = values.sort(dim=-1, descending=True, stable=True)
    return ordered[..., :count], index[..., :count]


def corrected_log_probs(head: CorrectionHead, prepared: Any, block: DraftBlock, slot: int, state: Tensor) -> Tensor:
    """Log-probabilities of a slot's candidates after each branch, normalised over the candidates.

    ``[R, F, K]``; or ``[R, 1, K]`` where the head does not tell branches apart.

    They are never above 0, which Lemma 1 rests on, and never NaN: what a drafter with non-finite logits cannot rank
    gets -inf, so that it costs acceptance and nothing else.
    """
    logits = block.base[:, slot, None] + head.score(prepared, slot, state)
    log_probs = logits.log_softmax(-1).clamp(max=0)
    return log_probs.masked_fill(log_probs.isnan(), float("-inf"))


def expand(head: CorrectionHead, block: DraftBlock, widths: Sequence[int]) -> Supertree:
    """Grows ``widths[d - 1]`` branches at depth ``d``, all live branches of all requests at once.

    Args:
        head: the correction head.
        block: candidates and base logits of at least ``len(widths)`` slots.
        widths: branches to keep at each depth, ``TreeConfig.widths``; each at most ``K`` times the one before
            (``K`` for the first).
    """
    num_requests, _, num_candidates = block.candidates.shape
    device = block.base.device
    prepared = head.prepare(block)
    state = head.root_state(prepared)
    score = torch.zeros(num_requests, 1, device=device)
    tokens, parents, scores = [], [], []
    first_parent = -1  # index of the parents' level in the supertree; the anchor is its own level
    for slot, width in enumerate(widths):
        log_probs = corrected_log_probs(head, prepared, block, slot, state)
        paths = (score[..., None] + log_probs).flatten(1)  # [R, F * K]
        score, best = best_first(paths, width)
        branch, choice = best // num_candidates, best % num_candidates  # [R, W]
        tokens.append(block.candidates[:, slot].gather(1, choice))
        parents.append(branch + first_parent)
        scores.append(score)
        first_parent = sum(widths[:slot])
        if slot + 1 < len(widths):
            state = head.advance(prepared, slot, select_branches(state, branch), choice)
    depths = torch.cat(
        [torch.full((width,), depth, dtype=torch.int64, device=device) for depth, width in enumerate(widths, start=1)]
    )
    return Supertree(torch.cat(tokens, 1), torch.cat(parents, 1), depths, torch.cat(scores, 1))
