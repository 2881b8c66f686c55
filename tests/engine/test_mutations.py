"""Each part of a round is needed: without it, the tests of losslessness fail."""

import pytest
from engine.engines import dartree, engine, run, runner, tokens
from vllm import SamplingParams

from vllm_dartree.engine import speculator as speculator_module
from vllm_dartree.engine.commit import commit_rows
from vllm_dartree.engine.state import TreeState

PARAMS = SamplingParams(temperature=0, max_tokens=48)


@pytest.fixture(scope="module")
def expected(prompts):
    return tokens(run(engine(), prompts[:4], PARAMS))


def _tokens_with_trees(prompts):
    return tokens(run(engine(dartree()), prompts[:4], PARAMS))


def test_nothing_changed(prompts, expected):
    assert _tokens_with_trees(prompts) == expected


def test_without_the_commit_of_keys_and_values(prompts, expected, monkeypatch):
    def commit_features_only(step, layers, *args):
        return commit_rows(step, [], *args)

    monkeypatch.setattr(speculator_module, "commit_rows", commit_features_only)
    assert _tokens_with_trees(prompts) != expected


def test_without_positions_by_depth(prompts, expected, monkeypatch):
    native = TreeState.begin_step

    def keep_sequential_positions(self, input_batch, prefill_len):
        positions = input_batch.positions.clone()
        step = native(self, input_batch, prefill_len)
        input_batch.positions.copy_(positions)
        return step

    monkeypatch.setattr(TreeState, "begin_step", keep_sequential_positions)
    assert _tokens_with_trees(prompts) != expected


@pytest.mark.slow
def test_with_a_plain_causal_mask(prompts, monkeypatch):
    # Warm, and on the prompts that leave most to the model (every second one), so that paths leave the spine: along the
    # first rows of a tree a plain causal mask is the right one.
    job = prompts[1:12:2], SamplingParams(temperature=1.2, seed=1, max_tokens=48)
    expected = tokens(run(engine(), *job))
    native = TreeState.begin_step

    def see_all_rows_before(self, input_batch, prefill_len):
        step = native(self, input_batch, prefill_len)
        step.topology.ancestors = step.topology.ancestors.new_ones(step.topology.ancestors.shape).tril()
        return step

    # The walk reads the same mask, so it gets the true one back.
    sampler = runner(engine(dartree())).rejection_sampler
    call = type(sampler).__call__

    def walk_with_the_true_mask(self, logits, input_batch, *args):
        state = self.state
        state.step.topology.ancestors = state.ancestors[input_batch.idx_mapping]
        return call(self, logits, input_batch, *args)

    monkeypatch.setattr(TreeState, "begin_step", see_all_rows_before)
    monkeypatch.setattr(type(sampler), "__call__", walk_with_the_true_mask)
    assert tokens(run(engine(dartree()), *job)) != expected


def test_without_the_gather_of_features_only_drafts_suffer(prompts, expected, monkeypatch):
    from engine.engines import counted

    def commit_cache_only(step, layers, slot_mappings, positions, aux_hidden_states):
        commit_rows(step, layers, slot_mappings, positions, None)
        return aux_hidden_states

    llm = engine(dartree())
    with counted(llm) as healthy:
        run(llm, prompts[:4], PARAMS)
    monkeypatch.setattr(speculator_module, "commit_rows", commit_cache_only)
    with counted(llm) as spoiled:
        assert tokens(run(llm, prompts[:4], PARAMS)) == expected
    assert spoiled.tau < healthy.tau
