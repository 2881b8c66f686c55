"""Trees cut by load: vLLM's schedule of budgets, and the automatic one."""

import itertools

from engine.engines import counted, dartree, engine, run, tokens
from vllm import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=48)


def test_an_automatic_budget_changes_speed_and_no_token(prompts):
    expected = tokens(run(engine(), prompts[:5], GREEDY))
    trees = engine(dartree(tree_budget="auto"), max_num_seqs=6)
    scheduler = trees.llm_engine.engine_core.engine_core.scheduler
    controller, verified = scheduler.dynamic_sd_lookup, set()
    controller.clock = itertools.count().__next__  # a second a step: what it tries must not depend on this machine
    observe = controller.observe_round
    controller.observe_round = lambda nodes, accepted: (verified.add(nodes), observe(nodes, accepted))
    with counted(trees) as drafts:
        assert tokens(run(trees, prompts[:5], GREEDY, arrive_every=2)) == expected
    assert {4, 16} <= verified
    assert drafts.accepted > 0
    assert 0 in {nodes for _, nodes in controller.seconds}


def test_a_batch_without_drafts_keeps_the_drafter_in_sync(prompts):
    """Two requests draft nothing, one alone grows trees: they are as good as if it had been alone all the time."""
    trees = engine(dartree(num_speculative_tokens_per_batch_size=[(1, 1, 16), (2, 16, 0)]))
    alone = SamplingParams(temperature=0, max_tokens=64)
    with counted(trees) as undisturbed:
        expected = tokens(run(trees, prompts[:1], alone))
    short = SamplingParams(temperature=0, max_tokens=12)
    with counted(trees) as drafts:
        assert tokens(run(trees, prompts[:2], [alone, short]))[:1] == expected
    assert drafts.rounds < undisturbed.rounds
    assert drafts.tau > 0.75 * undisturbed.tau
