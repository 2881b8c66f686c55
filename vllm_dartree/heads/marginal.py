"""No correction: every branch sees the drafter's marginal distribution of a slot (plain DFlash)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_dartree.heads.spec import ConfigKeys, DrafterSpec
from vllm_dartree.tree import CorrectionHead, DraftBlock


@dataclass(frozen=True)
class MarginalSpec(DrafterSpec):
    head = "marginal"

    @classmethod
    def claims(cls, keys: ConfigKeys) -> bool:
        return keys.get("projector_type") in (None, "dflash")

    def make_head(self, tensors: Mapping[str, Tensor], embed: Callable[[Tensor], Tensor]) -> "MarginalHead":
        return MarginalHead()

    def num_weights(self, hidden: int, vocabulary: int) -> int:
        return 0


class MarginalHead(CorrectionHead):
    """Its state is empty, ``[R, F, 0]``."""

    def root_state(self, prepared: DraftBlock) -> Tensor:
        return torch.empty(prepared.anchor.shape[0], 1, 0, device=prepared.base.device)

    def score(self, prepared: DraftBlock, slot: int, state: Tensor) -> Tensor:
        return torch.zeros(1, 1, 1, device=prepared.base.device)

    def advance(self, prepared: DraftBlock, slot: int, state: Tensor, choice: Tensor) -> Tensor:
        return state
