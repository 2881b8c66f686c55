"""Accept: one token per verify row from vLLM's own sampler, then the walk."""

import numpy as np
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

from vllm_dartree.engine.path_processors import DraftedPaths, PathProcessors
from vllm_dartree.engine.state import TreeState, TreeStep
from vllm_dartree.tree import Accepted, walk


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
        self.processors = PathProcessors(native.sampler)

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
        drafted = input_batch.input_ids[step.tokens].long()
        if invalid_drafts is not None:
            drafted = drafted.masked_fill(invalid_drafts, -1)
        if input_batch.has_structured_output_reqs:
            # A mask without any token: the scheduler forbids the node (`grammars`).
            drafted = drafted.masked_fill(logits.amax(-1) == float("-inf"), -1)
        cumulative = input_batch.cu_num_logits_np
        dims = self.sampler.get_logprobs_dims(input_batch.idx_mapping_np)
        accepted: list[Accepted] = []
        logprobs: list[LogprobsTensors] = []
        # Chunks as in vLLM's own rejection sampler, to bound the float32 copies of the logits.
        for start, end in _iter_request_chunks(cumulative, get_max_chunk_logits(logits.shape[1])):
            rows = slice(int(cumulative[start]), int(cumulative[end]))
            part = step.part(slice(start, end), rows)
            tokens = part.padded(drafted[rows])
            with self.processors.reading(DraftedPaths(part, tokens, self.state.max_depth)):
                sampled, processed = self._sample_rows(logits[rows], input_batch, start, end, rows, dims is not None)
            part.accepted = walk(
                tokens[:, 1:],
                part.parents,
                part.topology,
                part.padded(sampled.long()),
                self.state.max_depth,
                part.num_nodes,
            )
            accepted.append(part.accepted)
            if dims is not None:
                scored = processed if self.sampler.logprobs_mode.startswith("processed") else logits[rows]
                logprobs.append(self._path_logprobs(scored, part, input_batch, start, end, *dims))
                del scored
            del processed
        step.accepted = Accepted.cat(accepted)
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            (step.accepted.num_accepted + 1).to(input_batch.seq_lens.dtype),
            input_batch.seq_lens,
            input_batch.cu_num_logits,
            input_batch.idx_mapping,
            self.sampler.req_states.prefill_len.gpu,
        )
        return SamplerOutput(
            sampled_token_ids=step.accepted.tokens,
            logprobs_tensors=_cat_logprobs(logprobs),
            num_nans=num_nans,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )

    def _sample_rows(
        self, logits: Tensor, input_batch: InputBatch, start: int, end: int, rows: slice, return_logprobs: bool
    ) -> tuple[Tensor, Tensor]:
        """One token per row ``[N]``, and the processed logits ``[N, V]``, of the requests from ``start`` to ``end``."""
        tokens = input_batch.logits_indices[rows]
        return self.sampler.sample(
            logits,
            input_batch.expanded_idx_mapping[rows],
            input_batch.idx_mapping[start:end],
            input_batch.idx_mapping_np[start:end],
            input_batch.positions[tokens],
            input_batch.input_ids[tokens],
            input_batch.expanded_local_pos[rows],
            input_batch.seq_lens_cpu_upper_bound.numpy()[start:end],
            return_logprobs=return_logprobs,
        )

    def _path_logprobs(
        self,
        logits: Tensor,
        part: TreeStep,
        input_batch: InputBatch,
        start: int,
        end: int,
        num_logprobs: int,
        max_per_req_token_ids: int,
    ) -> LogprobsTensors:
        """The logprobs of the emitted tokens, from the rows of the path.

        vLLM reads those of a request from its first rows. It is given as many rows as a path can have, and not those of
        all nodes. ``logits`` are those of the part's rows, ``[N, V]``.
        """
        # On the host as on the device: how many rows a request has is known to both.
        num_rows = np.minimum(np.diff(input_batch.cu_num_logits_np[start : end + 1]), self.state.max_depth + 1)
        cumulative = np.concatenate([[0], np.cumsum(num_rows)])
        requests, depths = part.path_rows(int(cumulative[-1]))
        path, emitted = part.accepted.path[requests, depths], part.accepted.tokens[requests, depths]
        rows = part.first_rows[requests] + path.clamp(min=0)  # rows past the end of a path are never read
        return compute_topk_scores(
            logits[rows],
            num_logprobs,
            emitted.clamp(min=0),
            cumulative.tolist(),
            logprob_token_ids_state=self.sampler.logprob_token_ids_state,
            expanded_idx_mapping=input_batch.idx_mapping[start:end][requests],
            max_per_req_token_ids=max_per_req_token_ids,
            logits_mode=self.sampler.logprobs_mode.endswith("logits"),
        )


def _cat_logprobs(parts: list[LogprobsTensors]) -> LogprobsTensors | None:
    """The logprobs of all chunks; each counts its rows from 0."""
    if len(parts) < 2:
        return parts[0] if parts else None
    cumulative = [0]
    for part in parts:
        cumulative += [cumulative[-1] + count for count in part.cu_num_generated_tokens[1:]]
    return LogprobsTensors.cat(parts, cu_num_generated_tokens=cumulative)
