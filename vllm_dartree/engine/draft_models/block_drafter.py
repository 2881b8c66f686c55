"""DFlash drafters with a Domino head or none, as a vLLM model."""

from collections.abc import Iterable

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM, DFlashQwen3Model
from vllm.platforms import current_platform

from vllm_dartree.heads import DominoHead, DrafterSpec, MarginalHead
from vllm_dartree.heads.tensors import HeadTensorError
from vllm_dartree.tree import CorrectionHead

HEAD_PREFIXES = ("prefix_gru.", "embed_proj.")


class DartreeBlockModel(DFlashQwen3Model):
    """vLLM's backbone, with the keys of the context normalised as the checkpoint says on a CPU too."""

    def _normalize_context_k(self, all_k: Tensor) -> Tensor:
        if not current_platform.is_cpu():
            return super()._normalize_context_k(all_k)
        # vLLM normalises all layers in one call, with a row of weights for each; its kernel for CPUs takes the first
        # row for all of them, which ruins the drafts of every drafter with more than one layer.
        norms = [layer.self_attn.k_norm for layer in self.layers]
        return torch.stack([norm.forward_native(keys) for norm, keys in zip(norms, all_k, strict=True)])


class DartreeBlockDrafter(DFlashQwen3ForCausalLM):
    """vLLM's DFlash model; the head's tensors, which vLLM does not know, are kept aside and replicated on all ranks.

    It is registered under its own architecture name, so that plain ``dflash`` stays vLLM's own.
    """

    model_cls = DartreeBlockModel

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.head_tensors: dict[str, Tensor] = {}
        self.head_dtype = vllm_config.model_config.dtype

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        # vLLM may load weights into a CPU buffer first; the parameters tell where the model really lives.
        device = next(self.parameters()).device

        def backbone() -> Iterable[tuple[str, Tensor]]:
            for name, tensor in weights:
                if name.startswith(HEAD_PREFIXES):
                    self.head_tensors[name] = tensor.to(device=device, dtype=self.head_dtype, copy=True)
                else:
                    yield name, tensor

        super().load_weights(backbone())

    def correction_head(self, spec: DrafterSpec) -> CorrectionHead:
        """The head of the checkpoint; call it after the weights are loaded."""
        if spec.head == "domino":
            head = DominoHead(spec, self.head_tensors, self.embed_input_ids)
            rows, size = head.output_weight.shape[0], head.input_weight.shape[1]
            if rows < self.config.vocab_size or size != self.config.hidden_size:
                raise HeadTensorError(
                    f"the drafter's Domino head has {rows} rows of 'embed_proj.2.weight' and an input of {size}; its "
                    f"config needs {self.config.vocab_size} and {self.config.hidden_size}"
                )
            return head
        return MarginalHead()

    @torch.inference_mode()
    def embed_input_ids(self, input_ids: Tensor, *args: object, **kwargs: object) -> Tensor:
        # A vocab-parallel embedding takes a flat list of ids.
        return super().embed_input_ids(input_ids.flatten(), *args, **kwargs).unflatten(0, input_ids.shape)
