"""vLLM's models of block drafters, where dartree needs more of them than vLLM does.

They are registered under architectures of their own, so that vLLM's own methods keep vLLM's own models.
"""

import copy
from collections.abc import Iterable
from types import MethodType

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.models.lilicorr import LiLiCorrForCausalLM
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM, DFlashQwen3Model
from vllm.model_executor.models.qwen3_dflash2 import DFlash2Qwen3ForCausalLM
from vllm.platforms import current_platform

from vllm_dartree.engine.checkpoint import backbone_shapes, check_tensors, read_tensors
from vllm_dartree.heads import DrafterSpec
from vllm_dartree.tree import CorrectionHead


def mend_context_keys(model: nn.Module) -> None:
    """Has the keys of the context normalised as the checkpoint says on a CPU too.

    vLLM normalises all layers in one call, with a row of weights for each; its kernel for CPUs takes the first row for
    all of them, which ruins the drafts of every drafter with more than one layer.
    """
    if current_platform.is_cpu():
        model._normalize_context_k = MethodType(normalize_each_layer, model)


def normalize_each_layer(model: DFlashQwen3Model, all_k: Tensor) -> Tensor:
    """``DFlashQwen3Model._normalize_context_k``: the context's keys of all layers, ``[layers, ...]``."""
    norms = [layer.self_attn.k_norm for layer in model.layers]
    return torch.stack([norm.forward_native(keys) for norm, keys in zip(norms, all_k, strict=True)])


class _CheckedWeights:
    """Put before a model: broken checkpoints are refused by the name of the tensor."""

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        super().load_weights(read_tensors(weights, self.draft_model_config.model).items())


class _Backbone(DFlashQwen3Model):
    def _build_context_kv_buffers(self, layers_attn: list[nn.Module], has_bias: bool) -> None:
        super()._build_context_kv_buffers(layers_attn, has_bias)
        if self._fused_kv_weight is not None and self._fused_kv_weight.numel() == 0:
            # Dummy weights do not pass through `load_weights`, which calls this, so that a CPU has packed them by now.
            self._fused_kv_weight = None


class DartreeDFlash(DFlashQwen3ForCausalLM):
    """Keeps aside the head's tensors, which vLLM does not know; they are replicated on all ranks."""

    model_cls = _Backbone

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.spec: DrafterSpec = vllm_config.speculative_config.drafter
        self.head_dtype = vllm_config.model_config.dtype
        self.head_tensors: dict[str, Tensor] = {}
        self.has_dummy_weights = vllm_config.load_config.load_format == "dummy"

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        # vLLM may load weights into a CPU buffer first; the parameters tell where the model really lives.
        device, checkpoint = next(self.parameters()).device, self.draft_model_config.model
        tensors = read_tensors(weights, checkpoint)
        self.head_tensors = {
            name: tensors.pop(name).to(device=device, dtype=self.head_dtype, copy=True)
            for name in list(tensors)
            if name.startswith(self.spec.tensor_prefixes)
        }
        check_tensors(self.head_tensors, self._head_shapes(), checkpoint)
        if self.draft_model_config.quantization is None:
            check_tensors(tensors, backbone_shapes(self.config, len(self.spec.target_layer_ids)), checkpoint)
        super().load_weights(tensors.items())

    def correction_head(self) -> CorrectionHead:
        """The head of the checkpoint, once the weights are loaded."""
        if self.has_dummy_weights:
            # The range of vLLM's own dummy weights, which only parameters get.
            device = next(self.parameters()).device
            self.head_tensors = {
                name: torch.empty(shape, dtype=self.head_dtype, device=device).uniform_(-1e-3, 1e-3)
                for name, shape in self._head_shapes().items()
            }
        return self.spec.make_head(self.head_tensors, self.embed_input_ids)

    def _head_shapes(self) -> dict[str, tuple[int, ...]]:
        return self.spec.tensor_shapes(self.config.hidden_size, self.config.vocab_size, self.head_tensors)

    @torch.inference_mode()
    def embed_input_ids(self, input_ids: Tensor, *args: object, **kwargs: object) -> Tensor:
        # A vocab-parallel embedding takes a flat list of ids.
        return super().embed_input_ids(input_ids.flatten(), *args, **kwargs).unflatten(0, input_ids.shape)


class _OneBlock:
    """Put before a model that sizes its block by ``num_speculative_tokens``: that is ``B`` here, and the block is L."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        # Plain copies: vLLM's ``replace`` would check, and adjust, the parts that they share with the engine's config.
        block_config = copy.copy(vllm_config)
        block_config.speculative_config = copy.copy(vllm_config.speculative_config)
        block_config.speculative_config.num_speculative_tokens = vllm_config.speculative_config.drafter.num_slots
        with set_current_vllm_config(block_config):
            super().__init__(vllm_config=block_config, prefix=prefix)


class DartreeDFlash2(_CheckedWeights, _OneBlock, DFlash2Qwen3ForCausalLM):
    """Its convolutions run over the rows of a block."""


class DartreeLiLiCorr(_CheckedWeights, _OneBlock, LiLiCorrForCausalLM):
    """Its correlator has an embedding for every slot."""
