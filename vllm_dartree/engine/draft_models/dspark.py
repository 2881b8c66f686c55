"""DSpark: a Markov head, perhaps over a reduced vocabulary, perhaps with a quantised projection."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vllm_dartree.engine.draft_models.base import Drafted, DraftModel
from vllm_dartree.heads import DrafterConfigError, DrafterSpec, MarkovHead
from vllm_dartree.tree import DraftBlock, draft_block

_DEEPSEEK = "DeepSeek's DSpark is part of its target, whose MLA the attention over a tree does not compute"


class DSpark(DraftModel):
    name = "DSpark"
    heads = ("markov",)
    architectures = ("Qwen3DSparkModel", "DSparkDraftModel")
    refused = {
        "DSparkV41DraftModel": _DEEPSEEK,
        "Gemma4DSparkModel": "its targets are multimodal models, which were not tried with trees",
        "K3DSparkModel": "it drafts with MLA, on GPUs alone, and was not tried with trees",
        "MuseSparkDSparkModel": "vLLM's model of it was not tried with trees",
        "Qwen3OmniDSparkModel": "its target's M-RoPE moves along three positions, a tree's rows along one",
    }
    method = "dspark"
    top_k_key = "dspark_draft_topk"

    def __init__(self, model: nn.Module, spec: DrafterSpec, candidates: int, target: nn.Module) -> None:
        super().__init__(model, spec, candidates, target)
        markov, logits = model.model.markov_head, model.logits_processor
        self.vocabulary = model.target_vocab_size
        project = projection_rows(markov.markov_w2, markov.markov_w1.weight.dtype)
        offsets = model.draft_id_to_target_id  # [draft vocabulary], to add to an id; None: the vocabularies are one
        if offsets is not None:
            ids = torch.arange(offsets.shape[0], device=offsets.device)
            to_draft = torch.zeros(self.vocabulary, dtype=torch.int64, device=offsets.device)
            to_draft[ids + offsets] = ids
            of_draft = project
            project = lambda candidates: of_draft(to_draft[candidates])  # noqa: E731
        self.head = MarkovHead(markov.embed, project, logits.scale, logits.soft_cap)

    @classmethod
    def refusal(cls, config: Mapping[str, Any]) -> str | None:
        # vLLM knows Qwen3's and DeepSeek's by one architecture.
        is_deepseek = "DSparkDraftModel" in config["architectures"] and config.get("model_type") != "qwen3"
        return _DEEPSEEK if is_deepseek else None

    @classmethod
    def native_keys(cls, candidates: int) -> dict[str, Any]:
        return {cls.top_k_key: candidates}  # makes vLLM keep the rows of a quantised projection

    def block(self, drafted: Drafted) -> DraftBlock:
        logits = self.model.compute_draft_logits(drafted.hidden.flatten(0, 1))[:, : self.vocabulary]
        logits = logits.unflatten(0, drafted.hidden.shape[:2])
        block = draft_block(drafted.anchor, drafted.hidden, logits, self.candidates)
        block.candidates = self.model.map_draft_to_target(block.candidates)
        return block


def projection_rows(projection: nn.Module, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """From ids ``[...]`` of the draft's vocabulary to the rows ``[..., rank]`` of ``markov_w2``.

    As far as vLLM's ``DSparkMarkovHead.apply_bias_gathered`` goes.

    Raises:
        DrafterConfigError: the projection is quantised in another way.
    """
    if projection._retain_weight_for_gather and projection.is_w4a16_nvfp4:
        from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import dequantize_to_dtype

        def dequantised(ids: Tensor) -> Tensor:
            rows = ids.flatten()
            return dequantize_to_dtype(
                projection._nvfp4_weight_for_gather[rows],
                projection._nvfp4_weight_scale_for_gather[rows],
                projection._nvfp4_weight_global_scale_for_gather,
                dtype=dtype,
                block_size=projection._nvfp4_group_size_for_gather,
                swizzle=False,
            ).unflatten(0, ids.shape)

        return dequantised
    weight = getattr(projection, "weight", None)
    if weight is None or weight.dtype != dtype:
        raise DrafterConfigError(
            f"the drafter's 'markov_head.markov_w2' is quantised ({type(projection.quant_method).__name__}) so that "
            "the rows of single candidates cannot be had; use a checkpoint that leaves it unquantised, or has it in "
            "ModelOpt's W4A16 NVFP4"
        )
    return weight.__getitem__
