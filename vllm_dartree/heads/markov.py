"""The Markov head of DSpark: a low-rank bias from the token before."""

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from vllm_dartree.heads.spec import DrafterSpec
from vllm_dartree.heads.tensors import take
from vllm_dartree.tree import CorrectionHead, DraftBlock


class _Prepared(NamedTuple):
    block: DraftBlock
    candidate_weight: Tensor  # [R, L, K, rank]


class MarkovHead(CorrectionHead):
    """``score = scale * markov_w1[previous] . markov_w2[candidate]``; the state is the previous token, ``[R, F]``.

    Args:
        w1: ``markov_head.markov_w1.weight``, ``[V, rank]``.
        w2: ``markov_head.markov_w2.weight``, ``[V, rank]``.
        scale: the drafter's ``logit_scale``, which its logits are multiplied with too.
    """

    def __init__(self, w1: Tensor, w2: Tensor, scale: float = 1.0) -> None:
        self.w1, self.w2, self.scale = w1, w2, scale

    @classmethod
    def from_tensors(cls, spec: DrafterSpec, tensors: Mapping[str, Tensor]) -> "MarkovHead":
        """Raises HeadTensorError if a tensor is missing or has a wrong shape."""
        w1 = take(tensors, "markov_head.markov_w1.weight", (None, spec.markov_rank))
        w2 = take(tensors, "markov_head.markov_w2.weight", (w1.shape[0], spec.markov_rank))
        return cls(w1, w2, spec.logit_scale)

    def prepare(self, block: DraftBlock) -> _Prepared:
        return _Prepared(block, self.w2[block.candidates])

    def root_state(self, prepared: _Prepared) -> Tensor:
        return prepared.block.anchor[:, None]

    def score(self, prepared: _Prepared, slot: int, state: Tensor) -> Tensor:
        return self.scale * (self.w1[state] @ prepared.candidate_weight[:, slot].mT).float()

    def advance(self, prepared: _Prepared, slot: int, state: Tensor, choice: Tensor) -> Tensor:
        return prepared.block.candidates[:, slot].gather(1, choice)
