"""Propose: commit what the target accepted, run the drafter, grow the next trees."""

import copy
import logging
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.dflash.speculator import DFlashSpeculator
from vllm.v1.worker.gpu.spec_decode.dflash.utils import load_dflash_model
from vllm.v1.worker.gpu.spec_decode.dspark.utils import load_dspark_model

from vllm_dartree.config import DartreeSpeculativeConfig
from vllm_dartree.engine.commit import CachedLayer, commit_rows
from vllm_dartree.engine.debug import describe_round
from vllm_dartree.engine.draft_models import Drafted, DraftModel, kind_of
from vllm_dartree.engine.state import TreeState
from vllm_dartree.engine.vllm_models import mend_context_keys
from vllm_dartree.tree import DraftBlock, expand, prune

LOADERS = {"dflash": load_dflash_model, "dspark": load_dspark_model}

logger = logging.getLogger("vllm.dartree")


class DartreeSpeculator(DFlashSpeculator):
    """vLLM's DFlash speculator with a tree instead of a chain behind the drafter's forward.

    The drafter sees its block's ``L`` slots as ``num_speculative_tokens``; the scheduler sees the ``B`` nodes.
    """

    _speculator_name = "DARTree"
    draft_model: DraftModel

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        config = vllm_config.speculative_config
        assert isinstance(config, DartreeSpeculativeConfig)
        self.tree_config, self.drafter_spec = config.tree, config.drafter
        self.widths = self.tree_config.widths(self.drafter_spec.num_slots)
        self.original_config = vllm_config
        draft_config = copy.copy(vllm_config)
        draft_config.speculative_config = copy.copy(config)
        draft_config.speculative_config.num_speculative_tokens = self.drafter_spec.num_slots
        draft_config.speculative_config.num_speculative_tokens_per_batch_size = None
        super().__init__(draft_config, device)
        self.sample_from_anchor = self.drafter_spec.sample_from_anchor
        self.num_query_per_req = self.drafter_spec.num_query_rows
        budget = self.tree_config.budget
        self.draft_tokens = torch.zeros(self.max_num_reqs, budget, dtype=torch.int64, device=device)
        self.trees = TreeState(self.max_num_reqs, budget, len(self.widths), device)
        self.anchor_rows = torch.arange(self.max_num_reqs, device=device) * self.num_query_per_req
        # Of each request's last context token among the rows whose features this step has.
        self.context_rows = torch.zeros(self.max_num_reqs, dtype=torch.int64, device=device)
        self.cached_layers: list[CachedLayer] = []  # the target's, set by the runner
        self.skips_drafting = False  # in a step whose drafts nobody wants

    def load_draft_model(self, target_model: nn.Module, target_attn_layer_names: set[str]) -> nn.Module:
        # With the original config: replacing parts of a VllmConfig checks it all again, and this copy says L.
        model = LOADERS[self.method](target_model, self.original_config)
        mend_context_keys(model.model)
        kind = kind_of(self.drafter_spec)
        self.draft_model = kind(model, self.drafter_spec, self.tree_config.candidates, target_model)
        return model

    def _num_graph_context_tokens(self, num_reqs: int) -> int:
        return min(num_reqs * (self.tree_config.budget + 1), self.max_num_tokens)

    def _generate_draft(
        self,
        num_reqs: int,
        num_tokens_padded: int,
        attn_metadata: dict[str, Any] | None,
        slot_mappings: dict[str, Tensor] | None,
        num_tokens_across_dp: Tensor | None,
        cudagraph_runtime_mode: CUDAGraphMode = CUDAGraphMode.NONE,
    ) -> None:
        if self.skips_drafting:
            return
        hidden = self._run_model(
            num_tokens_padded, attn_metadata, slot_mappings, num_tokens_across_dp, cudagraph_runtime_mode
        )
        num_slots = self.num_speculative_steps
        drafted = Drafted(
            anchor=self.input_buffers.input_ids[self.anchor_rows[:num_reqs]].long(),
            hidden=hidden[self.sample_indices[: num_reqs * num_slots]].unflatten(0, (num_reqs, num_slots)),
            context=self.hidden_states[self.context_rows[:num_reqs]] if self.draft_model.reads_context else None,
        )
        self._grow(num_reqs, self.draft_model.block(drafted))

    def _grow(self, num_reqs: int, block: DraftBlock) -> None:
        tree = prune(
            expand(self.draft_model.head, block, self.widths), self.tree_config.budget, self.tree_config.depth_bonus
        )
        slots = self.sample_idx_mapping[: num_reqs * self.num_speculative_steps : self.num_speculative_steps]
        self.draft_tokens[:num_reqs] = self.trees.write(slots, tree)

    @torch.inference_mode()
    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: dict[str, Any],
        slot_mappings: dict[str, Tensor],
        last_hidden_states: Tensor,
        aux_hidden_states: list[Tensor] | None,
        num_sampled: Tensor,
        num_rejected: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        step = self.trees.step
        if step is not None and step.accepted is not None:
            if logger.isEnabledFor(logging.DEBUG):
                logger.debug("%s", describe_round(step, input_batch.input_ids))
            # Before the drafter's slots overwrite the shared slot-mapping buffer.
            aux_hidden_states = commit_rows(
                step, self.cached_layers, slot_mappings, input_batch.positions, aux_hidden_states
            )
        self.skips_drafting = kwargs.get("num_speculative_tokens") == 0
        if self.skips_drafting:
            # No drafts are wanted, but the drafter must learn of the context: on vLLM's eager route, which a profile
            # run takes too, that is a step of its own. vLLM 0.33 returns after it, 0.32 goes on to `_generate_draft`.
            kwargs["is_profile"] = True
        if self.draft_model.reads_context:
            num_reqs = input_batch.num_reqs
            ends = input_batch.query_start_loc[1 : num_reqs + 1] - num_rejected[:num_reqs]
            self.context_rows[:num_reqs] = (ends - 1).clamp(min=0)
        try:
            return super().propose(
                input_batch,
                attn_metadata,
                slot_mappings,
                last_hidden_states,
                aux_hidden_states,
                num_sampled,
                num_rejected,
                *args,
                **kwargs,
            )
        finally:
            self.skips_drafting = False  # graphs may be captured anew at any time
