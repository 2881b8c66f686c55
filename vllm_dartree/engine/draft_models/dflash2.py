"""DFlash2: convolutions in the backbone, and a selector over the model's own candidates."""

from torch import Tensor, nn

from vllm_dartree.engine.draft_models.base import Drafted, DraftModel
from vllm_dartree.heads import DrafterSpec, ScoredBlock, SelectorHead


class DFlash2(DraftModel):
    name = "DFlash2"
    heads = ("selector",)
    architectures = ("DFlash2DraftModel",)
    refused = {"DFlash2BeamDraftModel": "it searches its candidates with a beam of its own"}
    method = "dflash"
    vllm_model = "vllm_dartree.engine.vllm_models:DartreeDFlash2"

    def __init__(self, model: nn.Module, spec: DrafterSpec, candidates: int, target: nn.Module) -> None:
        super().__init__(model, spec, candidates, target)
        self.head = SelectorHead()

    def block(self, drafted: Drafted) -> ScoredBlock:
        # The model scores all of its own candidates, which are in descending order; the tree takes the first K.
        ids, base = self.model.compute_candidates(drafted.hidden.flatten(0, 1))
        ids, base = (x.unflatten(0, drafted.hidden.shape[:2]) for x in (ids, base))
        scores = self.scores(drafted, ids, base).float()[..., : self.candidates, : self.candidates]
        ids, base = ids[..., : self.candidates], base[..., : self.candidates]
        return ScoredBlock(drafted.anchor, drafted.hidden, ids, base, scores - base[..., None, :])

    def scores(self, drafted: Drafted, ids: Tensor, base: Tensor) -> Tensor:
        """What vLLM's speculator ranks a slot's candidates by, after each of the slot before: ``[R, L, K, K]``."""
        return self.model.model.candidate_selector(ids, base, drafted.hidden, drafted.anchor)
