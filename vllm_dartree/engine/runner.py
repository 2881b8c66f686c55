"""The model runner: vLLM's, with the tree put in where a chain was."""

import logging
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import is_global_first_rank
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import get_max_chunk_logits
from vllm.v1.worker.gpu.spec_decode.utils import DraftTokensHandler

from vllm_dartree.engine.attention import install_tree_attention
from vllm_dartree.engine.sampler import TreeSampler
from vllm_dartree.engine.speculator import DartreeSpeculator
from vllm_dartree.engine.state import TreeState
from vllm_dartree.features import check_supported, check_target_class
from vllm_dartree.grammars import packed

logger = logging.getLogger("vllm.dartree")


class TreeDraftsHandler(DraftTokensHandler):
    """Gives vLLM's scheduler the nodes' parents with their tokens, where it asks for drafts: a grammar needs both."""

    def __init__(self, device: torch.device, trees: TreeState) -> None:
        super().__init__(device)
        self.trees = trees

    def set_draft_tokens(self, input_batch: InputBatch, draft_tokens: Tensor) -> None:
        if input_batch.has_structured_output_reqs:
            parents = self.trees.parents[input_batch.idx_mapping.long(), 1 : draft_tokens.shape[1] + 1]
            draft_tokens = packed(draft_tokens.long(), parents)
        super().set_draft_tokens(input_batch, draft_tokens)


class DartreeRunnerMixin:
    """Put before a V2 model runner (``vllm.v1.worker.gpu.model_runner.GPUModelRunner`` or a subclass)."""

    speculator: DartreeSpeculator

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        check_supported(vllm_config)
        check_target_class(vllm_config)
        super().__init__(vllm_config, device)
        self.speculator = DartreeSpeculator(vllm_config, device)
        self.draft_tokens_handler = TreeDraftsHandler(self.device, self.speculator.trees)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        trees = self.speculator.trees
        self.speculator.cached_layers = install_tree_attention(
            self.vllm_config, self.speculator.draft_attn_layer_names, trees
        )
        self.rejection_sampler = TreeSampler(self.rejection_sampler, self.speculative_config, self.device, trees)
        self._log_setup()

    def _log_setup(self) -> None:
        if not is_global_first_rank():
            return
        tree, drafter = self.speculative_config.tree, self.speculative_config.drafter
        backends = {layer.attention.attn_backend.get_name() for layer in self.speculator.cached_layers}
        logger.info(
            "DARTree: B=%d nodes (%s), W=%d, K=%d, L=%d slots, beta=%g, %s to depth %d; %s head; trees on %s; drafted "
            "as a chain: %s",
            tree.budget,
            "auto" if self.speculative_config.auto_budget else "fixed",
            tree.width,
            tree.candidates,
            drafter.num_slots,
            tree.depth_bonus,
            tree.variant,
            self.speculator.trees.max_depth,
            drafter.head,
            ", ".join(sorted(backends)),
            "requests that custom logits processors take" if self.rejection_sampler.processors.custom else "none",
        )

    def _dummy_sampler_run(self, hidden_states: Tensor) -> None:
        # vLLM's profile counts one row of logits a request. A verify round has B + 1, and a float32 copy of a chunk.
        num_rows = min(self.max_num_tokens, self.max_num_reqs * self.decode_query_len)
        logits = self.model.compute_logits(hidden_states.new_zeros(num_rows, hidden_states.shape[-1]))
        chunk = logits[: get_max_chunk_logits(logits.shape[1])].float()
        super()._dummy_sampler_run(hidden_states)
        del logits, chunk

    def add_requests(self, scheduler_output: SchedulerOutput) -> None:
        super().add_requests(scheduler_output)
        processors = self.rejection_sampler.processors
        if processors.custom:
            for request in scheduler_output.scheduled_new_reqs:
                slot = self.req_states.req_id_to_index[request.req_id]
                self.speculator.trees.as_chain[slot] = slot in processors.taken
            processors.taken.clear()

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        # Whatever this step is, a tree of the last one must not leak into it.
        self.speculator.trees.step = None
        return super().execute_model(*args, **kwargs)

    def prepare_attn(self, input_batch: InputBatch) -> tuple[tuple[Tensor, ...], Tensor]:
        # Cache slots come from sequential positions, so before rows move to the positions of their depth.
        prepared = super().prepare_attn(input_batch)
        if input_batch.num_draft_tokens > 0:
            self.num_logits = np.diff(input_batch.cu_num_logits_np)
            self.speculator.trees.begin_step(input_batch, self.req_states.prefill_len.gpu)
        return prepared

    def _set_active_loras(
        self,
        prompt_lora_mapping: tuple[int, ...],
        token_lora_mapping: tuple[int, ...],
        lora_requests: set[LoRARequest],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        # vLLM's `LoraState.make_lora_inputs` counts one row of logits for each request, however many were drafted.
        if self.speculator.trees.step is not None:
            prompt_lora_mapping = tuple(np.repeat(prompt_lora_mapping, self.num_logits))
        super()._set_active_loras(prompt_lora_mapping, token_lora_mapping, lora_requests, *args, **kwargs)


class DartreeModelRunner(DartreeRunnerMixin, GPUModelRunner):
    """For GPUs."""
