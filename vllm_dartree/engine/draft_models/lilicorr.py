"""LiLiCorr: a correlator that attends over the candidates of all slots at once."""

from torch import Tensor, nn

from vllm_dartree.engine.draft_models.base import Drafted
from vllm_dartree.engine.draft_models.dflash2 import DFlash2
from vllm_dartree.heads import DrafterSpec


class LiLiCorr(DFlash2):
    name = "LiLiCorr"
    heads = ("lilicorr",)
    architectures = ("LiLiCorrDraftModel",)
    refused = {}
    reads_context = True
    vllm_model = "vllm_dartree.engine.vllm_models:DartreeLiLiCorr"

    def __init__(self, model: nn.Module, spec: DrafterSpec, candidates: int, target: nn.Module) -> None:
        super().__init__(model, spec, candidates, target)
        language_model = target.get_language_model() if hasattr(target, "get_language_model") else target
        # Also where the drafter has an embedding of its own.
        self.target_embedding = language_model.model.embed_tokens

    def scores(self, drafted: Drafted, ids: Tensor, base: Tensor) -> Tensor:
        anchor = self.model.model.hidden_norm(drafted.context)
        is_valid = anchor.new_ones(anchor.shape[0], dtype=bool)
        return self.model.model.lilicorr(self.target_embedding(ids), base, drafted.hidden, anchor, is_valid)
