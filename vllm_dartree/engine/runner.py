"""The model runner: vLLM's, with the tree put in where a chain was."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from vllm_dartree.config import check_supported, check_target_class
from vllm_dartree.engine.attention import install_tree_attention
from vllm_dartree.engine.sampler import TreeSampler
from vllm_dartree.engine.speculator import DartreeSpeculator


class DartreeRunnerMixin:
    """Put before a V2 model runner (``vllm.v1.worker.gpu.model_runner.GPUModelRunner`` or a subclass)."""

    speculator: DartreeSpeculator

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        check_supported(vllm_config)
        check_target_class(vllm_config)
        super().__init__(vllm_config, device)
        self.speculator = DartreeSpeculator(vllm_config, device)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        trees = self.speculator.trees
        self.speculator.cached_layers = install_tree_attention(
            self.vllm_config, self.speculator.draft_attn_layer_names, trees
        )
        # Also those of installed packages, which the configuration does not list. vLLM's own are all told apart below.
        self.has_custom_processors = any(
            not type(processor).__module__.startswith("vllm.") for processor in self.sampler.logits_processors
        )
        self.rejection_sampler = TreeSampler(self.rejection_sampler, self.speculative_config, self.device, trees)

    def add_requests(self, scheduler_output: SchedulerOutput) -> None:
        super().add_requests(scheduler_output)
        as_chain = self.speculator.trees.as_chain
        for request in scheduler_output.scheduled_new_reqs:
            slot = self.req_states.req_id_to_index[request.req_id]
            as_chain[slot] = self._is_path_dependent(request.sampling_params)

    def _is_path_dependent(self, params: SamplingParams | None) -> bool:
        """Whether the logits of a row depend on the tokens drafted before it, which vLLM takes to be the rows before.

        That is so on a chain. On a tree such a request would be sampled as if its siblings stood in its text.
        """
        if params is None:
            return False
        return bool(
            params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
            or params.bad_words
            or params.structured_outputs is not None
            or params.thinking_token_budget is not None
            or self.has_custom_processors
        )

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        # Whatever this step is, a tree of the last one must not leak into it.
        self.speculator.trees.step = None
        return super().execute_model(*args, **kwargs)

    def prepare_attn(self, input_batch: InputBatch) -> tuple[tuple[Tensor, ...], Tensor]:
        # Cache slots come from sequential positions, so before rows move to the positions of their depth.
        prepared = super().prepare_attn(input_batch)
        self.num_logits = np.diff(input_batch.cu_num_logits_np)
        if input_batch.num_draft_tokens > 0:
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
