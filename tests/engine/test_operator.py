"""What an operator sees: metrics, the line at start, the periodic line, and a round's tree in the debug log."""

import logging
from contextlib import contextmanager
from types import ModuleType

import pytest
from engine.engines import counted, dartree, engine, run, runner
from vllm import SamplingParams
from vllm.v1.metrics import loggers

from vllm_dartree.engine import runner as runner_module
from vllm_dartree.engine import speculator as speculator_module

GREEDY = SamplingParams(temperature=0, max_tokens=24)


@contextmanager
def logged(module: ModuleType):
    """The messages of a module's logger, at all levels; vLLM sets its own up anew for each engine."""
    logger, messages = logging.Logger("recorder"), []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logger.addHandler(handler)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "logger", logger)
        yield messages


@pytest.fixture(scope="module")
def operated(prompts):
    """An engine of this module's own, since the newest one in a process owns its metrics; and what it logged."""
    with logged(runner_module) as messages:
        llm = engine(dartree(20, tree_width=3), max_num_seqs=6)
    return llm, messages


def _values(llm) -> dict[str, object]:
    """By name and the one label that tells a metric's children apart."""
    values = {}
    for metric in llm.get_metrics():
        if metric.name.startswith(("vllm:dartree", "vllm:spec_decode")):
            extra = [value for key, value in metric.labels.items() if key in ("reason", "depth")]
            values[(metric.name, *extra)] = metric
    return values


def test_metrics(prompts, operated):
    llm, _ = operated
    with counted(llm) as drafts:
        run(llm, prompts[:4], GREEDY)
    values = _values(llm)
    assert values["vllm:dartree_rounds",].value == drafts.rounds
    assert values["vllm:dartree_nodes_verified",].value == values["vllm:spec_decode_num_draft_tokens",].value
    lengths = values["vllm:dartree_accepted_length",]
    assert (lengths.count, lengths.sum) == (drafts.rounds, drafts.accepted)
    depths = [values["vllm:dartree_accepted_at_depth", str(depth)].value for depth in range(1, 16)]
    assert ("vllm:dartree_accepted_at_depth", "16") not in values
    assert sum(depths) == drafts.accepted
    # The histogram counts rounds of at most a length, the counters those of at least one.
    for depth, count in enumerate(depths, start=1):
        assert lengths.buckets[f"{depth - 0.5}"] == drafts.rounds - count
    assert values["vllm:dartree_chain_requests", "custom logits processors"].value == 0


def test_the_line_at_start_says_how_trees_are_grown(operated):
    _, messages = operated
    line = next(message for message in messages if message.startswith("DARTree: "))
    for part in (
        "B=20 nodes (fixed)",
        "W=3",
        "K=64",
        "L=15",
        "beta=-0.2",
        "domino head",
        "CPU_ATTN",
        "a chain: none",
    ):
        assert part in line


def test_the_periodic_line_has_tau_and_no_depth_beyond_the_block(prompts, operated, monkeypatch):
    llm, _ = operated
    # A server has such a logger; offline there is none. It is asked once, and not by the clock.
    logger, manager = loggers.LoggingStatLogger(llm.llm_engine.vllm_config), llm.llm_engine.logger_manager
    record = manager.record
    monkeypatch.setattr(
        manager, "record", lambda *stats, **more: (logger.record(*stats, **more), record(*stats, **more))
    )
    with counted(llm) as drafts:
        run(llm, prompts[:1], GREEDY)
    with logged(loggers) as messages:
        logger.log()
    line = next(message for message in messages if message.startswith("DARTree metrics: "))
    assert f"tau: {drafts.tau:.2f}" in line and f"Rounds: {drafts.rounds}" in line
    assert line.split("by depth: ")[1].count(",") == 14
    assert not any("SpecDecoding metrics" in message for message in messages)


def test_the_debug_log_draws_the_tree_of_a_round(prompts, operated):
    llm, _ = operated
    with logged(speculator_module) as messages:
        emitted = run(llm, prompts[:1], GREEDY)[0].tokens
    drawn = [message.splitlines()[1:] for message in messages if message.startswith("DARTree round at position")]
    assert drawn
    # The starred nodes of the first round, which follow the prefill's token, are what was emitted.
    path = [int(line.split()[0]) for line in drawn[0] if line.endswith("*")]
    assert path == emitted[: len(path)]
    assert [len(line) - len(line.lstrip()) for line in drawn[0] if line.endswith("*")] == list(
        range(0, 2 * len(path), 2)
    )
    assert len(drawn[0]) <= 1 + runner(llm).speculator.trees.budget
