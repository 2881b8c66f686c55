"""The Selector head of DFlash2 and LiLiCorr: a K x K table of transitions per slot."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from vllm_dartree.heads.spec import DrafterSpec
from vllm_dartree.heads.tensors import take
from vllm_dartree.tree import CorrectionHead, DraftBlock
from vllm_dartree.tree.head import select_branches


class _Prepared(NamedTuple):
    block: DraftBlock
    transitions: Tensor  # [R, L, K, K] float32


class SelectorHead(CorrectionHead):
    """``score = transitions[slot, parent, candidate]``; the state is the parent's candidate index, ``[R, F]``.

    Args:
        transitions: from a block to its table ``[R, L, K, K]``, without the candidates' base logits. The first slot
            has the anchor for its only parent, so that all its ``K`` rows are alike.
    """

    def __init__(self, transitions: Callable[[DraftBlock], Tensor]) -> None:
        self.transitions = transitions

    @classmethod
    def from_tensors(cls, spec: DrafterSpec, tensors: Mapping[str, Tensor]) -> "SelectorHead":
        """DFlash2's selector: predecessors modulated by the slot's hidden state, against successors.

        Raises:
            HeadTensorError: a tensor is missing or has a wrong shape.
        """
        prefix = "candidate_selector."
        predecessor = take(tensors, prefix + "predecessor_codebook", (None, None))  # [V, rank]
        successor = take(tensors, prefix + "successor_codebook", tuple(predecessor.shape))
        projection = take(tensors, prefix + "hidden_projection.weight", (predecessor.shape[1], None))

        def transitions(block: DraftBlock) -> Tensor:
            num_candidates = block.candidates.shape[-1]
            anchors = block.anchor[:, None, None].expand(-1, 1, num_candidates)
            parents = torch.cat([anchors, block.candidates[:, :-1]], dim=1)  # [R, L, K]
            modulated = predecessor[parents] * (block.hidden @ projection.mT)[:, :, None]
            return modulated @ successor[block.candidates].mT

        return cls(transitions)

    def prepare(self, block: DraftBlock) -> _Prepared:
        return _Prepared(block, self.transitions(block).float())

    def root_state(self, prepared: _Prepared) -> Tensor:
        return torch.zeros_like(prepared.block.anchor)[:, None]

    def score(self, prepared: _Prepared, slot: int, state: Tensor) -> Tensor:
        return select_branches(prepared.transitions[:, slot], state)

    def advance(self, prepared: _Prepared, slot: int, state: Tensor, choice: Tensor) -> Tensor:
        return choice
