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


def mend_context_keys(model: nn.Module) -> None:
    """Has the keys of the context normalised as the checkpoint says on a CPU too.

    vLLM normalises all layers in one call, with a row of weights for each; its kernel for CPUs takes the first row for
    all of them, which ruins the drafts of every drafter with more than one layer.
    """
    if current_platform.is_cpu():
        model._normalize_context_k = MethodType(normalize_each_layer, model)


def normalize_each_layer(model: DFlashQwen3Model, all_k: Tensor) -> Tensor:
    norms = [layer.self_attn.k_norm for layer in model.layers]
    return torch.stack([norm.forward_native(keys) for norm, keys in zip(norms, all_k, strict=True)])


class DartreeDFlash(DFlashQwen3ForCausalLM):
    """Keeps aside the head's tensors, which vLLM does not know; they are replicated on all ranks."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.head_tensors: dict[str, Tensor] = {}
        self.head_prefixes = vllm_config.speculative_config.drafter.tensor_prefixes
        self.head_dtype = vllm_config.model_config.dtype

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        # vLLM may load weights into a CPU buffer first; the parameters tell where the model really lives.
        device = next(self.parameters()).device

        def backbone() -> Iterable[tuple[str, Tensor]]:
            for name, tensor in weights:
                if name.startswith(self.head_prefixes):
                    self.head_tensors[name] = tensor.to(device=device, dtype=self.head_dtype, copy=True)
                else:
                    yield name, tensor

        super().load_weights(backbone())

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


class DartreeDFlash2(_OneBlock, DFlash2Qwen3ForCausalLM):
    """Its convolutions run over the rows of a block."""


class DartreeLiLiCorr(_OneBlock, LiLiCorrForCausalLM):
    """Its correlator has an embedding for every slot."""
