"""vLLM's logits processors that look at the text before a row, on trees.

On a chain the drafts before a row are the rows before it, which is what vLLM's processors read. Here a row's drafts are
its *path* down from the anchor. In a step without drafts vLLM's own code runs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.thinking_budget import ThinkingBudgetState

from vllm_dartree.engine.state import TreeStep
from vllm_dartree.kernels import use_triton
from vllm_dartree.kernels.path_logits import (
    forbid_bad_words,
    forbid_bad_words_torch,
    penalise_paths,
    penalise_paths_torch,
)


class DraftedPaths:
    """What was drafted between the anchor and each verify row, the row's own token last; derived if it is asked for.

    Args:
        step: the rows, ``N``.
        drafted: ``[R, B + 1]`` int64, the token of each row, in the first column the anchor's.
        max_depth: ``D``.
    """

    def __init__(self, step: TreeStep, drafted: Tensor, max_depth: int) -> None:
        self.step, self.drafted, self.max_depth = step, drafted, max_depth

    @cached_property
    def depths(self) -> Tensor:
        """``[N]`` int64, tokens on each path."""
        return self.step.topology.depths[self.step.requests, self.step.rows]

    @cached_property
    def tokens(self) -> Tensor:
        """``[N, D]`` int64, by depth; -1 past the path's end."""
        topology = self.step.topology
        # The first column takes the anchor and all that is not on a path, and is cut off.
        by_depth = topology.depths[:, None].where(topology.ancestors, 0)
        paths = self.drafted.new_full((*by_depth.shape[:2], self.max_depth + 1), -1)
        paths.scatter_(2, by_depth, self.drafted[:, None].expand_as(by_depth))
        return paths[self.step.requests, self.step.rows, 1:]


class PathPenalties(PenaltiesState):
    """Repetition, frequency and presence penalties."""

    paths: DraftedPaths | None = None

    def apply(self, logits: Tensor, ctx: LogitsContext) -> Tensor:
        if self.paths is None or not self.use_penalty[ctx.idx_mapping_np].any():
            return super().apply(logits, ctx)
        tokens = self.paths.tokens
        unpenalised = logits.gather(1, tokens.clamp(min=0))
        # Every row as if it came right after the anchor, and then what its path adds to that.
        super().apply(logits, replace(ctx, expanded_local_pos=torch.zeros_like(ctx.expanded_local_pos)))
        penalise = penalise_paths if use_triton(logits.device) else penalise_paths_torch
        penalise(
            logits,
            unpenalised,
            tokens,
            ctx.expanded_idx_mapping,
            self.repetition_penalty.gpu,
            self.frequency_penalty.gpu,
            self.presence_penalty.gpu,
            self.output_bin_counts,
        )
        return logits


class PathBadWords(BadWordsState):
    """Words that must not be completed."""

    paths: DraftedPaths | None = None
    longest: np.ndarray  # [max_num_reqs], tokens of each request's longest word

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        self.longest[req_idx] = max(map(len, sampling_params.bad_words_token_ids or ()), default=0)
        return super().add_request(req_idx, sampling_params)

    def apply(self, logits: Tensor, ctx: LogitsContext) -> Tensor:
        max_num_words = int(self.num_bad_words.np[ctx.idx_mapping_np].max())
        if self.paths is None or not max_num_words:
            return super().apply(logits, ctx)
        forbid = forbid_bad_words if use_triton(logits.device) else forbid_bad_words_torch
        forbid(
            logits,
            self.paths.tokens,
            self.paths.depths,
            ctx.expanded_idx_mapping,
            self.bad_word_token_ids.gpu,
            self.bad_word_offsets.gpu,
            self.num_bad_words.gpu,
            self.req_states.all_token_ids.gpu,
            self.req_states.prompt_len.gpu,
            self.req_states.total_len.gpu,
            max_num_words,
            int(self.longest[ctx.idx_mapping_np].max()),
        )
        return logits


class PathThinkingBudget(ThinkingBudgetState):
    """The end of the thinking is forced after so many tokens of it."""

    paths: DraftedPaths | None = None

    def apply(self, logits: Tensor, ctx: LogitsContext) -> None:
        if self.paths is None or not self.enabled or not self.use_thinking_budget[ctx.idx_mapping_np].any():
            super().apply(logits, ctx)
            return
        # With no rows to force it on, vLLM looks for the markers in the text up to the anchor and remembers them.
        super().apply(logits[:0], ctx)
        paths, slots = self.paths, ctx.expanded_idx_mapping.long()
        start, natural_end, end = (
            self.reasoning_start_token_ids,
            self.natural_reasoning_end_token_ids,
            self.reasoning_end_token_ids,
        )
        # The end of the text, as long as a marker that the path may complete, and the path behind it.
        total_len, depths = self.req_states.total_len.gpu[slots].long(), paths.depths
        tail = max(len(start), len(natural_end), len(end)) - 1
        places = total_len[:, None] + torch.arange(-tail, 0, device=slots.device)
        text = self.req_states.all_token_ids.gpu[slots[:, None], places.clamp(min=0)].long()
        window = torch.cat([text.where(places >= 0, -1), paths.tokens], 1)
        first = total_len - tail  # where the window begins
        last_start = torch.maximum(self.cached_last_start[slots], _last(window, start, first))
        last_end = torch.maximum(self.cached_last_end[slots], _last(window, natural_end, first))
        thinks = (last_start >= 0) & (last_start > last_end)
        budget = self.thinking_token_budget.gpu[slots]
        exhausted = thinks & (budget >= 0) & (total_len + depths - (last_start + len(start)) >= budget)
        # Of the forced end, the longest part that the row's text ends with goes on.
        back = torch.arange(len(end) - 1, 0, -1, device=slots.device)
        suffix = window.gather(1, tail + depths[:, None] - back)  # [N, len(end) - 1]
        said = depths.new_zeros(depths.shape)
        for length in range(1, len(end)):
            said = torch.where((suffix[:, len(end) - 1 - length :] == end[:length]).all(1), length, said)
        forced = end[said][:, None].long()
        logits.scatter_(1, forced, logits.gather(1, forced).masked_fill(exhausted[:, None], 1e9))


def _last(window: Tensor, marker: Tensor, first: Tensor) -> Tensor:
    """Where the marker begins last in each row of ``window``, which begins at ``first`` (``[N]``); -1: nowhere."""
    found = (window.unfold(1, len(marker), 1) == marker).all(2)
    places = first[:, None] + torch.arange(found.shape[1], device=window.device)
    return places.where(found, -1).amax(1)


class PathProcessors:
    """Those of a sampler, which are changed in place, since vLLM's runner holds them too.

    ``custom`` are those of others, which know of no paths; ``taken`` collects the slots of the requests that they take
    (``LogitsProcessor.add_request``), until somebody clears it.
    """

    KINDS = {kind.__base__: kind for kind in (PathPenalties, PathBadWords, PathThinkingBudget)}

    def __init__(self, sampler: Sampler) -> None:
        native = (*sampler.logits_processors, sampler.thinking_budget_state)
        for processor in native:
            if kind := self.KINDS.get(type(processor)):
                processor.__class__ = kind
                if kind is PathBadWords:
                    processor.longest = np.zeros(len(processor.num_bad_words.np), dtype=np.int64)
        self.processors = [processor for processor in native if type(processor) in self.KINDS.values()]
        assert len(self.processors) == len(self.KINDS), "vLLM's sampler lacks a processor that trees change"
        known = (LogitBiasState, *self.KINDS.values())
        self.custom = [processor for processor in sampler.logits_processors if type(processor) not in known]
        self.taken: set[int] = set()
        for processor in self.custom:
            processor.add_request = self._noting(processor.add_request)

    def _noting(self, add_request: Callable[[int, SamplingParams], bool]) -> Callable[[int, SamplingParams], bool]:
        def add_and_note(req_idx: int, sampling_params: SamplingParams) -> bool:
            takes = add_request(req_idx, sampling_params)
            if takes:
                self.taken.add(req_idx)
            return takes

        return add_and_note

    @contextmanager
    def reading(self, paths: DraftedPaths) -> Iterator[None]:
        """Within, they read these paths."""
        for processor in self.processors:
            processor.paths = paths
        try:
            yield
        finally:
            for processor in self.processors:
                processor.paths = None
