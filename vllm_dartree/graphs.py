"""Which batches get CUDA graphs: those that trees come in."""

import logging

from vllm.config import VllmConfig
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

from vllm_dartree.budget import budget_ladder

logger = logging.getLogger("vllm.dartree")

# Tokens of a step beyond which its kernels take longer than launching them one by one.
MAX_GRAPH_TOKENS = 2048


def request_counts(limit: int, steps: int = 8) -> list[int]:
    """Numbers of requests up to ``limit``, each above the one before by 1, or by at most its ``steps``-th part."""
    counts, count = [], 1
    while count < limit:
        counts.append(count)
        count += max(1, count // steps)
    return [*counts, limit] if limit > 0 else []


def add_graph_sizes(vllm_config: VllmConfig) -> None:
    """Adds to the sizes of CUDA graphs, in tokens, the batches that trees come in.

    A request has ``B + 1`` verify rows (or as many as ``num_speculative_tokens_per_batch_size`` says) and the rows of
    the drafter's block. Target and drafter share one list, and vLLM rounds every size in it up to a multiple of each
    number of rows, so that with many budgets graphs multiply: those of the automatic ones stand further apart. A batch
    whose next larger graph is one of another budget runs in piecewise graphs.
    """
    speculative, compilation = vllm_config.speculative_config, vllm_config.compilation_config
    max_num_seqs = vllm_config.scheduler_config.max_num_seqs
    widest = {speculative.num_speculative_tokens + 1: max_num_seqs}  # verify rows: requests in the largest such batch
    steps, kept = 8, set(compilation.cudagraph_capture_sizes)
    if speculative.auto_budget:
        # What vLLM is told has all budgets in it, each at one batch size; any may come at any.
        widest = dict.fromkeys((nodes + 1 for nodes in budget_ladder(speculative.num_speculative_tokens)), max_num_seqs)
        steps, kept = 2, {tokens for tokens in range(1, MAX_GRAPH_TOKENS) if tokens % max(widest) == 0}
    elif speculative.num_speculative_tokens_per_batch_size is not None:
        schedule = build_dynamic_sd_schedule_lookup(
            speculative.num_speculative_tokens_per_batch_size, max_num_seqs, speculative.num_speculative_tokens
        )
        widest = {nodes + 1: requests for requests, nodes in enumerate(schedule) if requests}
    widest = {rows: min(requests, MAX_GRAPH_TOKENS // rows) for rows, requests in widest.items()}
    sizes = {rows * count for rows, requests in widest.items() for count in request_counts(requests, steps)}
    most, block = max(widest.values()), speculative.drafter.num_query_rows
    sizes |= {block * count for count in request_counts(min(most, MAX_GRAPH_TOKENS // block), steps)}
    compilation.cudagraph_capture_sizes = sorted(sizes | kept)
    compilation.max_cudagraph_capture_size = None
    logger.info(
        "CUDA graphs cover trees of up to %d requests, and %d sizes in all; set cudagraph_capture_sizes or "
        "max_cudagraph_capture_size to choose others",
        most,
        len(compilation.cudagraph_capture_sizes),
    )
