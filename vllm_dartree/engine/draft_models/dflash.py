"""Plain DFlash, and DFlash with a head whose tensors vLLM does not know (Domino)."""

from torch import nn

from vllm_dartree.engine.draft_models.base import Drafted, DraftModel
from vllm_dartree.heads import DrafterSpec
from vllm_dartree.tree import DraftBlock, draft_block

_XPRESS = (
    "its refiner settles one block, and the logits of a slot hold behind that block's own tokens alone; a branch "
    "beside them would be ranked by the scores of another branch"
)


class DFlash(DraftModel):
    name = "DFlash"
    heads = ("marginal", "domino")
    architectures = ("DFlashDraftModel", "DominoDraftModel")
    refused = {
        "Qwen3XPressModel": _XPRESS,
        "DFlashQwen3XPressModel": _XPRESS,
        "DFlashLagunaForCausalLM": "vLLM's model of it was not tried with trees",
        "MuseGlimmerAssistantModel": "vLLM's model of it was not tried with trees",
    }
    method = "dflash"
    vllm_model = "vllm_dartree.engine.vllm_models:DartreeDFlash"

    def __init__(self, model: nn.Module, spec: DrafterSpec, candidates: int, target: nn.Module) -> None:
        super().__init__(model, spec, candidates, target)
        self.head = model.correction_head()

    def block(self, drafted: Drafted) -> DraftBlock:
        logits = self.model.compute_logits(drafted.hidden.flatten(0, 1))  # [R * L, V]
        logits = logits.unflatten(0, drafted.hidden.shape[:2])
        return draft_block(drafted.anchor, drafted.hidden, logits, self.candidates)
