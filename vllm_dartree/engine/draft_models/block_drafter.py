"""DFlash drafters with a Domino head or none, as a vLLM model."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM, DFlashQwen3Model
from vllm.platforms import current_platform

from vllm_dartree.engine.draft_models.checkpoint import backbone_shapes, check_tensors, read_tensors
from vllm_dartree.heads import DominoHead, DrafterSpec, MarginalHead
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

    def _build_context_kv_buffers(self, layers_attn: list[nn.Module], has_bias: bool) -> None:
        super()._build_context_kv_buffers(layers_attn, has_bias)
        if self._fused_kv_weight is not None and self._fused_kv_weight.numel() == 0:
            # Dummy weights do not pass through `load_weights`, which calls this, so that a CPU has packed them by now.
            self._fused_kv_weight = None


class DartreeBlockDrafter(DFlashQwen3ForCausalLM):
    """vLLM's DFlash model; the head's tensors, which vLLM does not know, are kept aside and replicated on all ranks.

    It is registered under its own architecture name, so that plain ``dflash`` stays vLLM's own.
    """

    model_cls = DartreeBlockModel

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.head_dtype = vllm_config.model_config.dtype
        self.num_features = len(vllm_config.speculative_config.drafter.target_layer_ids)
        self.head_tensors: dict[str, Tensor] = {}
        self.has_dummy_weights = vllm_config.load_config.load_format == "dummy"

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        # vLLM may load weights into a CPU buffer first; the parameters tell where the model really lives.
        device, checkpoint = next(self.parameters()).device, self.draft_model_config.model
        tensors = read_tensors(weights, checkpoint)
        self.head_tensors = {
            name: tensors.pop(name).to(device=device, dtype=self.head_dtype, copy=True)
            for name in list(tensors)
            if name.startswith(HEAD_PREFIXES)
        }
        if self.draft_model_config.quantization is None:
            check_tensors(tensors, backbone_shapes(self.config, self.num_features), checkpoint)
        super().load_weights(tensors.items())

    def correction_head(self, spec: DrafterSpec) -> CorrectionHead:
        """The head of the checkpoint; call it after the weights are loaded."""
        shapes = {}
        if spec.head == "domino":
            has_bias = any(name.startswith("prefix_gru.bias") for name in self.head_tensors)
            shapes = DominoHead.shapes(spec, self.config.hidden_size, self.config.vocab_size, has_bias)
        if self.has_dummy_weights:
            # The range of vLLM's own dummy weights, which only parameters get.
            device = next(self.parameters()).device
            self.head_tensors = {
                name: torch.empty(shape, dtype=self.head_dtype, device=device).uniform_(-1e-3, 1e-3)
                for name, shape in shapes.items()
            }
        check_tensors(self.head_tensors, shapes, self.draft_model_config.model)
        return DominoHead(spec, self.head_tensors, self.embed_input_ids) if shapes else MarginalHead()

    @torch.inference_mode()
    def embed_input_ids(self, input_ids: Tensor, *args: object, **kwargs: object) -> Tensor:
        # A vocab-parallel embedding takes a flat list of ids.
        return super().embed_input_ids(input_ids.flatten(), *args, **kwargs).unflatten(0, input_ids.shape)
