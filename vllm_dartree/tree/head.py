"""What the expansion needs from a drafter (a block) and from a correction head (three functions)."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

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


class CorrectionHead(ABC):
    """Restores the dependence of a slot on the tokens drafted before it.

    A *state* is one tensor ``[R, F, ...]`` for ``F`` branches of every request; it stands for the anchor and the
    tokens drafted along the branch. ``slot`` counts from 0 here: the slot that follows the anchor is 0.
    """

    def prepare(self, block: DraftBlock) -> Any:
        """What depends on the block alone and is worth computing once for all slots; passed to the other three."""
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


def select_branches(state: Tensor, branch: Tensor) -> Tensor:
    """``state[r, branch[r, f]]`` for a state ``[R, F, ...]`` and branches ``[R, F']``."""
    index = branch.reshape(*branch.shape, *([1] * (state.ndim - 2)))
    return torch.take_along_dim(state, index, dim=1)
