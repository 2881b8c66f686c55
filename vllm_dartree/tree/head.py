"""What the expansion needs from a drafter (a block) and from a correction head."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass
class DraftBlock:
    """What one drafter forward says about ``R`` requests, reduced to ``K`` candidates a slot."""

    anchor: Tensor  # [R] int64
    hidden: Tensor  # [R, L, H], the drafter's hidden state z of each slot
    candidates: Tensor  # [R, L, K] int64, distinct ids of the target's vocabulary
    base: Tensor  # [R, L, K] float32, their base logits


def draft_block(anchor: Tensor, hidden: Tensor, logits: Tensor, candidates: int) -> DraftBlock:
    """Selects the top-K candidates of every slot, once per round.

    Args:
        anchor: ``[R]`` int64.
        hidden: ``[R, L, H]``.
        logits: ``[R, L, V]`` base logits.
        candidates: ``K``; at most ``V``, which ``torch.topk`` refuses otherwise.
    """
    values, ids = logits.topk(candidates, dim=-1)
    return DraftBlock(anchor, hidden, ids, values.float())


class Branches(NamedTuple):
    """The branches that a depth keeps, best first."""

    scores: Tensor  # [R, W] float32, log-probability of the path from the anchor
    parents: Tensor  # [R, W] int64, the branch of the depth before that each one extends
    choices: Tensor  # [R, W] int64, index among the slot's K candidates
    tokens: Tensor  # [R, W] int64


class CorrectionHead(ABC):
    """Restores the dependence of a slot on the tokens drafted before it.

    A *state* is one tensor ``[R, F, ...]`` for ``F`` branches of every request; it stands for the anchor and the
    tokens drafted along the branch. ``slot`` counts from 0 here: the slot that follows the anchor is 0.

    Three functions define a head. ``grow`` and ``follow`` are what the expansion calls; they are written in terms of
    the three, and a head may compute the same in fewer launches.
    """

    def prepare(self, block: DraftBlock) -> Any:
        """What depends on the block alone and is worth computing once for all slots; passed to the others."""
        return block

    @abstractmethod
    def root_state(self, prepared: Any) -> Tensor:
        """The state after the anchor, ``[R, 1, ...]``."""

    @abstractmethod
    def score(self, prepared: Any, slot: int, state: Tensor) -> Tensor:
        """The bias ``[R, F, K]`` (float32), or what broadcasts to it, to add to the base logits of the candidates."""

    @abstractmethod
    def advance(self, prepared: Any, slot: int, state: Tensor, choice: Tensor) -> Tensor:
        """The states after each branch took candidate ``choice`` (``[R, F]`` int64, an index among ``K``)."""

    def grow(self, prepared: Any, block: DraftBlock, slot: int, state: Tensor, scores: Tensor, width: int) -> Branches:
        """The ``width`` best children of the branches, whose log-probabilities are ``scores`` (``[R, F]``)."""
        log_probs = corrected_log_probs(self, prepared, block, slot, state)
        num_candidates = block.candidates.shape[-1]
        best, place = best_first((scores[..., None] + log_probs).flatten(1), width)
        choices = place % num_candidates
        return Branches(best, place // num_candidates, choices, block.candidates[:, slot].gather(1, choices))

    def follow(self, prepared: Any, slot: int, state: Tensor, branches: Branches) -> Tensor:
        """The states of the branches that ``grow`` kept."""
        return self.advance(prepared, slot, select_branches(state, branches.parents), branches.choices)


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


def select_branches(state: Tensor, branch: Tensor) -> Tensor:
    """``state[r, branch[r, f]]`` for a state ``[R, F, ...]`` and branches ``[R, F']``."""
    index = branch.reshape(*branch.shape, *([1] * (state.ndim - 2)))
    return torch.take_along_dim(state, index, dim=1)
