"""The Markov head of DSpark: a low-rank bias from the token before."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from vllm_dartree.heads.spec import ConfigKeys, DrafterSpec
from vllm_dartree.heads.tensors import take
from vllm_dartree.tree import CorrectionHead, DraftBlock


@dataclass(frozen=True)
class MarkovSpec(DrafterSpec):
    markov_rank: int = 0

    head = "markov"
    samples_from_anchor_by_default = True
    tensor_prefixes = ("markov_head.",)

    @classmethod
    def claims(cls, keys: ConfigKeys) -> bool:
        return keys.get("markov_rank") is not None

    @classmethod
    def own_fields(cls, keys: ConfigKeys) -> dict[str, Any]:
        fields = {"markov_rank": keys.integer("markov_rank", minimum=1, needed_by="the Markov head")}
        if keys.get("dspark_draft_topk") is not None:
            fields["top_k"] = keys.integer("dspark_draft_topk", minimum=1, needed_by="the Markov head")
        return fields

    def make_head(self, tensors: Mapping[str, Tensor], embed: Callable[[Tensor], Tensor]) -> "MarkovHead":
        w1 = take(tensors, "markov_head.markov_w1.weight", (None, self.markov_rank))
        w2 = take(tensors, "markov_head.markov_w2.weight", (w1.shape[0], self.markov_rank))
        return MarkovHead(w1.__getitem__, w2.__getitem__, self.logit_scale)

    def num_weights(self, hidden: int, vocabulary: int) -> int:
        return 2 * vocabulary * self.markov_rank


class _Prepared(NamedTuple):
    block: DraftBlock
    candidate_weight: Tensor  # [R, L, K, rank]


class MarkovHead(CorrectionHead):
    """``score = scale * cap(markov_w1[previous] . markov_w2[candidate])``; the state is the previous token, ``[R, F]``.

    Args:
        embed: rows of ``markov_w1``, ids ``[...]`` to ``[..., rank]``.
        project: rows of ``markov_w2``, candidates ``[R, L, K]`` to ``[R, L, K, rank]``.
        scale: what the drafter's logits are multiplied with too.
        soft_cap: of the drafter's logits, if they have one.
    """

    def __init__(
        self,
        embed: Callable[[Tensor], Tensor],
        project: Callable[[Tensor], Tensor],
        scale: float = 1.0,
        soft_cap: float | None = None,
    ) -> None:
        self.embed, self.project, self.scale, self.soft_cap = embed, project, scale, soft_cap

    def prepare(self, block: DraftBlock) -> _Prepared:
        return _Prepared(block, self.project(block.candidates))

    def root_state(self, prepared: _Prepared) -> Tensor:
        return prepared.block.anchor[:, None]

    def score(self, prepared: _Prepared, slot: int, state: Tensor) -> Tensor:
        bias = (self.embed(state) @ prepared.candidate_weight[:, slot].mT).float()
        if self.soft_cap is not None:
            bias = self.soft_cap * (bias / self.soft_cap).tanh()
        return self.scale * bias

    def advance(self, prepared: _Prepared, slot: int, state: Tensor, choice: Tensor) -> Tensor:
        return prepared.block.candidates[:, slot].gather(1, choice)
