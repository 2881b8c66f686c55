"""No correction: every branch sees the drafter's marginal distribution of a slot (plain DFlash)."""

import torch
from torch import Tensor

from vllm_dartree.tree import CorrectionHead, DraftBlock


class MarginalHead(CorrectionHead):
    """Its state is empty, ``[R, F, 0]``."""

    def root_state(self, prepared: DraftBlock) -> Tensor:
        return torch.empty(prepared.anchor.shape[0], 1, 0, device=prepared.base.device)

    def score(self, prepared: DraftBlock, slot: int, state: Tensor) -> Tensor:
        return torch.zeros(1, 1, 1, device=prepared.base.device)

    def advance(self, prepared: DraftBlock, slot: int, state: Tensor, choice: Tensor) -> Tensor:
        return state
