"""The Selector head of DFlash2 and LiLiCorr: a K x K table of transitions per slot."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vllm_dartree.heads.spec import ConfigKeys, DrafterSpec
from vllm_dartree.heads.tensors import take
from vllm_dartree.tree import CorrectionHead, DraftBlock
from vllm_dartree.tree.head import select_branches


@dataclass(frozen=True)
class SelectorSpec(DrafterSpec):
    """Of DFlash2, whose selector modulates predecessors by the slot's hidden state, against successors."""

    selector_rank: int = 0

    head = "selector"
    tensor_prefixes = ("candidate_selector.",)

    @classmethod
    def claims(cls, keys: ConfigKeys) -> bool:
        return keys.get("selector_top_k") is not None

    @classmethod
    def own_fields(cls, keys: ConfigKeys) -> dict[str, Any]:
        return {
            "selector_rank": keys.integer("selector_rank", minimum=1, needed_by="the Selector head"),
            "top_k": keys.integer("selector_top_k", minimum=1, needed_by="the Selector head"),
        }

    def make_head(self, tensors: Mapping[str, Tensor], embed: Callable[[Tensor], Tensor]) -> "SelectorHead":
        prefix = "candidate_selector."
        predecessor = take(tensors, prefix + "predecessor_codebook", (None, self.selector_rank))
        successor = take(tensors, prefix + "successor_codebook", tuple(predecessor.shape))
        projection = take(tensors, prefix + "hidden_projection.weight", (self.selector_rank, None))

        def transitions(block: DraftBlock) -> Tensor:
            num_candidates = block.candidates.shape[-1]
            anchors = block.anchor[:, None, None].expand(-1, 1, num_candidates)
            parents = torch.cat([anchors, block.candidates[:, :-1]], dim=1)  # [R, L, K]
            modulated = predecessor[parents] * (block.hidden @ projection.mT)[:, :, None]
            return modulated @ successor[block.candidates].mT

        return SelectorHead(transitions)

    def num_weights(self, hidden: int, vocabulary: int) -> int:
        return self.selector_rank * (2 * vocabulary + hidden)


@dataclass(frozen=True)
class LiLiCorrSpec(DrafterSpec):
    """Of LiLiCorr, whose correlator attends over the candidates of all slots at once."""

    head = "lilicorr"
    tensor_prefixes = ("lilicorr.",)

    @classmethod
    def claims(cls, keys: ConfigKeys) -> bool:
        return keys.get("lilicorr_candidate_topk") is not None

    @classmethod
    def own_fields(cls, keys: ConfigKeys) -> dict[str, Any]:
        return {"top_k": keys.integer("lilicorr_candidate_topk", minimum=1, needed_by="the LiLiCorr head")}


@dataclass
class ScoredBlock(DraftBlock):
    """A block for whose candidates the drafter's model has scored all transitions itself."""

    transitions: Tensor  # [R, L, K, K], without the candidates' base logits


class _Prepared(NamedTuple):
    block: DraftBlock
    transitions: Tensor  # [R, L, K, K] float32


class SelectorHead(CorrectionHead):
    """``score = transitions[slot, parent, candidate]``; the state is the parent's candidate index, ``[R, F]``.

    Args:
        transitions: from a block to its table ``[R, L, K, K]``, without the candidates' base logits; by default the
            table of a ``ScoredBlock``. The first slot has the anchor for its only parent, so that all its ``K`` rows
            are alike.
    """

    def __init__(self, transitions: Callable[[DraftBlock], Tensor] = attrgetter("transitions")) -> None:
        self.transitions = transitions

    def prepare(self, block: DraftBlock) -> _Prepared:
        return _Prepared(block, self.transitions(block).float())

    def root_state(self, prepared: _Prepared) -> Tensor:
        return torch.zeros_like(prepared.block.anchor)[:, None]

    def score(self, prepared: _Prepared, slot: int, state: Tensor) -> Tensor:
        return select_branches(prepared.transitions[:, slot], state)

    def advance(self, prepared: _Prepared, slot: int, state: Tensor, choice: Tensor) -> Tensor:
        return choice
