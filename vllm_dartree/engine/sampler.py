"""Accept: one token per verify row from vLLM's own sampler, then the walk."""

import torch
from torch import Tensor
from vllm.config import SpeculativeConfig
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import InputBatch, get_num_sampled_and_rejected
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import (
    RejectionSampler,
    _iter_request_chunks,
    get_max_chunk_logits,
)

from vllm_dartree.engine.state import TreeState, TreeStep
from vllm_dartree.tree import walk


class TreeSampler(RejectionSampler):
    """Takes the place of ``GPUModelRunner.rejection_sampler``, which is called whenever a batch has drafts.

    The noise of vLLM's sampler is keyed by the request's seed and the row's position, and a row's position is its
    depth's, so a row samples exactly what plain decoding would sample there.
    """

    def __init__(
        self, native: RejectionSampler, spec_config: SpeculativeConfig, device: torch.device, state: TreeState
    ) -> None:
        super().__init__(native.sampler, spec_config, device)
        self.state = state

    def __call__(
        self,
        logits: Tensor,  # [N, V]
        input_batch: InputBatch,
        draft_logits: Tensor | None = None,
        invalid_drafts: Tensor | None = None,
    ) -> SamplerOutput:
        step = self.state.step
        assert step is not None, "a batch with drafts was sampled without its trees"
        num_nans = get_num_nans(logits) if self.sampler.compute_nans else None
        logprobs_dims = self.sampler.get_logprobs_dims(input_batch.idx_mapping_np)
        keep_processed = logprobs_dims is not None and self.sampler.logprobs_mode.startswith("processed")
        sampled, processed = self._sample_rows(logits, input_batch, keep_processed)

        drafted = input_batch.input_ids[step.tokens].long()
        if invalid_drafts is not None:
            drafted = drafted.masked_fill(invalid_drafts, -1)
        accepted = walk(
            step.padded(drafted)[:, 1:],
            step.parents,
            step.topology,
            step.padded(sampled.long()),
            self.state.max_depth,
            step.num_nodes,
        )
        step.accepted = accepted
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            (accepted.num_accepted + 1).to(input_batch.seq_lens.dtype),
            input_batch.seq_lens,
            input_batch.cu_num_logits,
            input_batch.idx_mapping,
            self.sampler.req_states.prefill_len.gpu,
        )
        logprobs = None
        if logprobs_dims is not None:
            scored = logits if processed is None else processed
            logprobs = self._path_logprobs(scored, step, input_batch, *logprobs_dims)
        return SamplerOutput(
            sampled_token_ids=accepted.tokens,
            logprobs_tensors=logprobs,
            num_nans=num_nans,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )

    def _sample_rows(
        self, logits: Tensor, input_batch: InputBatch, keep_processed: bool
    ) -> tuple[Tensor, Tensor | None]:
        """One token per row ``[N]``; and the processed logits ``[N, V]`` if they are to be kept."""
        positions = input_batch.positions[input_batch.logits_indices]
        input_ids = input_batch.input_ids[input_batch.logits_indices]
        cumulative = input_batch.cu_num_logits_np
        sampled, processed = [], []
        # Chunks as in vLLM's own rejection sampler, to bound the float32 copy of the logits.
        for start, end in _iter_request_chunks(cumulative, get_max_chunk_logits(logits.shape[1])):
            rows = slice(int(cumulative[start]), int(cumulative[end]))
            tokens, chunk = self.sampler.sample(
                logits[rows],
                input_batch.expanded_idx_mapping[rows],
                input_batch.idx_mapping[start:end],
                input_batch.idx_mapping_np[start:end],
                positions[rows],
                input_ids[rows],
                input_batch.expanded_local_pos[rows],
                input_batch.seq_lens_cpu_upper_bound.numpy()[start:end],
                return_logprobs=keep_processed,
            )
            sampled.append(tokens)
            if keep_processed:
                processed.append(chunk)
        return torch.cat(sampled), torch.cat(processed) if keep_processed else None

    def _path_logprobs(
        self, logits: Tensor, step: TreeStep, input_batch: InputBatch, num_logprobs: int, num_token_ids: int
    ) -> LogprobsTensors:
        """vLLM reads the logprobs of emitted token ``d`` from row ``d``: puts the rows of the path there.

        As vLLM's ``Sampler`` does and its ``RejectionSampler`` does not, it honours ``logprob_token_ids``.
        """
        emitted = step.accepted.tokens
        # Rows past the path are read by nobody; any token will do for them.
        sampled = emitted[step.requests, step.rows.clamp(max=emitted.shape[1] - 1)].clamp(min=0)
        return compute_topk_scores(
            logits[step.in_path_order()],
            num_logprobs,
            sampled,
            input_batch.cu_num_logits_np.tolist(),
            self.sampler.logprob_token_ids_state,
            input_batch.expanded_idx_mapping,
            num_token_ids,
            logits_mode=self.sampler.logprobs_mode.endswith("logits"),
        )
