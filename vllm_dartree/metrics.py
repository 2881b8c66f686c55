"""What an operator sees of the trees: counters in vLLM's own Prometheus registry, and a periodic line in its log.

All numbers come from what vLLM's scheduler counts for every speculative method; the position of an accepted token among
them is its depth.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from vllm.config import VllmConfig
from vllm.v1.metrics.utils import create_metric_per_engine
from vllm.v1.spec_decode.metrics import SpecDecodingLogging, SpecDecodingStats

CUSTOM_PROCESSORS = "custom logits processors"

# By reason, for requests that are validated in this process; a new engine takes the registry over, as with vLLM's own.
_chain_requests: dict[str, Any] = {}


def _max_depth(vllm_config: VllmConfig) -> int:
    speculative = vllm_config.speculative_config
    return len(speculative.tree.widths(speculative.drafter.num_slots))


class TreeMetrics:
    """Counters of one engine's front end. Their names begin with ``vllm:``, so that vLLM cleans them up with its own.

    Args:
        counter: ``prometheus_client.Counter`` or Ray's, as vLLM's logger uses it.
        histogram: likewise.
        vllm_config: of an engine with this method.
        per_engine_labelvalues: values of ``model_name`` and ``engine``, by engine index.
    """

    def __init__(
        self,
        counter: type,
        histogram: type,
        vllm_config: VllmConfig,
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        self.max_depth = _max_depth(vllm_config)
        labels = ["model_name", "engine"]

        def per_engine(kind: type, name: str, text: str, **settings: Any) -> dict[int, Any]:
            metric = kind(name=f"vllm:dartree_{name}", documentation=text, labelnames=labels, **settings)
            return create_metric_per_engine(metric, per_engine_labelvalues)

        self.rounds = per_engine(counter, "rounds", "Verify rounds, counted for each request.")
        self.nodes = per_engine(counter, "nodes_verified", "Rows verified besides the anchors.")
        self.lengths = per_engine(
            histogram,
            "accepted_length",
            "Accepted nodes of a verify round; it emits one token more.",
            buckets=[depth + 0.5 for depth in range(self.max_depth)],
        )
        at_depth = counter(
            name="vllm:dartree_accepted_at_depth",
            documentation="Verify rounds that accepted a node at this depth.",
            labelnames=[*labels, "depth"],
        )
        self.at_depth = {
            index: [at_depth.labels(*values, str(depth)) for depth in range(1, self.max_depth + 1)]
            for index, values in per_engine_labelvalues.items()
        }
        chains = counter(
            name="vllm:dartree_chain_requests",
            documentation="Requests that may be drafted as a chain, by what decides on it.",
            labelnames=["model_name", "reason"],
        )
        model_name = vllm_config.model_config.served_model_name
        _chain_requests[CUSTOM_PROCESSORS] = chains.labels(model_name, CUSTOM_PROCESSORS)

    def observe(self, stats: SpecDecodingStats, engine: int) -> None:
        self.rounds[engine].inc(stats.num_drafts)
        self.nodes[engine].inc(stats.num_draft_tokens)
        reached = stats.num_accepted_tokens_per_pos[: self.max_depth]
        for counter, rounds in zip(self.at_depth[engine], reached, strict=True):
            counter.inc(rounds)
        # Rounds of each length, out of the rounds that got at least so far.
        for length, rounds in enumerate(-np.diff([stats.num_drafts, *reached, 0])):
            for _ in range(rounds):
                self.lengths[engine].observe(length)


def count_chain_request(speculative_config: Any) -> None:
    """Counts a request of an engine with custom logits processors; whether they take it, only the worker learns."""
    if speculative_config.has_custom_processors and CUSTOM_PROCESSORS in _chain_requests:
        _chain_requests[CUSTOM_PROCESSORS].inc()


class TreeLogging(SpecDecodingLogging):
    """vLLM's periodic line, in the words of trees and without the positions that no path can reach."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.max_depth = _max_depth(vllm_config)
        super().__init__()

    def log(self, log_fn: Callable[..., None]) -> None:
        if not self.num_drafts:
            return
        rounds, nodes, accepted = map(sum, (self.num_drafts, self.num_draft_tokens, self.num_accepted_tokens))
        elapsed = max(time.monotonic() - self.last_log_time, 1e-9)
        reached = np.sum(self.accepted_tokens_per_pos_lists, axis=0)[: self.max_depth] / rounds
        log_fn(
            "DARTree metrics: tau: %.2f, Accepted throughput: %.2f tokens/s, Verified throughput: %.2f nodes/s, "
            "Rounds: %d, Accepted: %d tokens, Verified: %d nodes, Acceptance rate by depth: %s",
            1 + accepted / rounds,
            accepted / elapsed,
            nodes / elapsed,
            rounds,
            accepted,
            nodes,
            ", ".join(f"{rate:.3f}" for rate in reached),
        )
        self.reset()
