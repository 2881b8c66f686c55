"""Faults that users of trees and block drafters met elsewhere; the tests of other modules replay the rest.

| fault | test |
|---|---|
| corrupt tokens on the second prefix-cache hit | ``test_lossless.test_prefix_cache_hits`` |
| ``logprobs`` together with custom token ids | ``test_request_features.test_feature``, and the refusal beside it |
| ``prompt_logprobs`` with chunked prefill | ``test_request_features.test_prompt_logprobs_of_a_prompt_in_chunks_...`` |
| a penalty lost when the batch changes | ``test_request_features.test_feature``: requests come and go |
| compaction overwrites rows still to be read | ``test_hot_path.test_rows_of_the_path_move_left_over_each_other_...`` |
| compaction by the block table of another KV group | ``test_kv_groups`` |
| the host's token counts are only an upper bound | ``test_processes``: asynchronous scheduling |
| the last tree leaks into the drafter's attention | ``test_lossless.test_trees_and_rounds_equal_...`` |
| a tree that was dropped is read as a chain | ``test_kv_groups``: a request that waits for a step |
"""

import json
import re

import pytest
from engine.engines import counted, dartree, engine, outputs, run, runner, tokens
from engine.extensions import END_OF_THINKING
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from vllm_dartree.engine.state import TreeState, TreeStep

DRAFTS = dartree(8, tree_width=4)


@pytest.mark.slow
def test_a_ramp_of_1_to_64_requests_that_join_and_leave(prompts, steps):
    trees = engine(dartree(4), max_num_seqs=64)
    params = [SamplingParams(temperature=0, max_tokens=10 + 7 * number % 13, ignore_eos=True) for number in range(64)]
    expected = outputs(engine(), prompts[:64], params)
    core, waiting, tokens_of = trees.llm_engine, list(range(64)), {}
    arrivals = 1
    while waiting or core.has_unfinished_requests():
        for number in waiting[:arrivals]:
            core.add_request(str(number), {"prompt_token_ids": prompts[number]}, params[number])
        waiting, arrivals = waiting[arrivals:], 2 * arrivals
        for output in core.step():
            tokens_of[output.request_id] = list(output.outputs[0].token_ids)
    assert [tokens_of[str(number)] for number in range(64)] == [list(one.outputs[0].token_ids) for one in expected]
    sizes = [len(step.roots) for step in steps]
    assert max(sizes) > 48
    assert len(set(sizes)) > 8


@pytest.mark.slow
def test_preemptions_amid_verification_with_priorities_and_grammars(crowded_engines, prompts):
    plain, trees = crowded_engines
    grammar = StructuredOutputsParams(regex=r"( [a-z]{2,9}){20,30}")
    params = [SamplingParams(temperature=0, max_tokens=56, ignore_eos=True) for _ in range(8)]
    params[1] = SamplingParams(temperature=0, max_tokens=56, structured_outputs=grammar)
    params[4] = SamplingParams(temperature=0, max_tokens=56, structured_outputs=grammar, repetition_penalty=1.2)
    # All need a second cache block on their way, and there are six.
    asked = [[*(prompt + 3 * prompts[0])[:100], END_OF_THINKING] for prompt in prompts[:8]]
    expected = tokens(run(plain, asked, params))
    core, seen = trees.llm_engine, {}
    with counted(trees) as drafts:
        for number, (prompt, one) in enumerate(zip(asked, params, strict=True)):
            # The later, the more urgent: each arrival may push out those before it.
            core.add_request(str(number), {"prompt_token_ids": prompt}, one, priority=-number)
            for _ in range(2):
                for output in core.step():
                    seen[output.request_id] = list(output.outputs[0].token_ids)
        while core.has_unfinished_requests():
            for output in core.step():
                seen[output.request_id] = list(output.outputs[0].token_ids)
    assert [seen[str(number)] for number in range(8)] == expected
    assert drafts.preemptions > 3
    assert drafts.accepted > 100


def test_a_guided_request_is_the_first_of_an_engine(padded_pair, prompts):
    target, drafter = padded_pair
    params = SamplingParams(temperature=0, max_tokens=24, structured_outputs=StructuredOutputsParams(json_object=True))
    # Settings that no other test has, so that the engine is a new one.
    plain, trees = engine(model=target, max_model_len=96), engine(dartree(8, drafter), model=target, max_model_len=96)
    assert runner(trees).vocab_size % 32
    expected = outputs(plain, prompts[1:2], params)[0].outputs[0]
    actual = outputs(trees, prompts[1:2], params)[0].outputs[0]
    assert list(actual.token_ids) == list(expected.token_ids)
    assert actual.text.lstrip().startswith("{")


@pytest.mark.slow
def test_a_streamed_array_parses(crowded_engines, prompts):
    schema = {"type": "array", "items": {"enum": ["cold", "green", "warm"]}, "minItems": 3, "maxItems": 6}
    params = SamplingParams(
        temperature=1.2,
        seed=3,
        max_tokens=60,
        structured_outputs=StructuredOutputsParams(json=schema),
        output_kind=RequestOutputKind.DELTA,
    )
    texts = []
    for llm in crowded_engines:
        core, pieces = llm.llm_engine, []
        core.add_request("0", {"prompt_token_ids": [*prompts[1], END_OF_THINKING]}, params)
        while core.has_unfinished_requests():
            pieces += [output.outputs[0].text for output in core.step()]
        texts.append("".join(pieces))
    assert texts[0] == texts[1]
    assert 3 <= len(json.loads(texts[1])) <= 6


@pytest.mark.slow
def test_the_end_of_thinking_amid_an_accepted_path(crowded_engines, prompts, steps):
    plain, trees = crowded_engines
    # Close to what the target writes anyway, so that drafts behind the end of thinking may be right.
    grammar = StructuredOutputsParams(regex=r"\n    return [a-z]{3,9}\n\n\ndef [a-z]{3,9}")
    params = SamplingParams(temperature=0, max_tokens=40, structured_outputs=grammar)
    expected = outputs(plain, prompts[2:7:4], params)
    steps.clear()
    actual = outputs(trees, prompts[2:7:4], params)
    amid = 0
    for step in steps:
        for path in step.accepted.tokens.tolist():
            amid += END_OF_THINKING in path[:-1] and path[path.index(END_OF_THINKING) + 1] >= 0
    assert amid > 0
    for one, other in zip(actual, expected, strict=True):
        assert list(one.outputs[0].token_ids) == list(other.outputs[0].token_ids)
        assert re.fullmatch(grammar.regex, one.outputs[0].text.partition("):")[2])


def test_positions_are_written_where_the_forward_reads_them_and_restored(prompts, monkeypatch):
    """A captured graph replays the runner's own buffer; one made for a step would leave it at sequential positions."""
    llm = engine(DRAFTS)
    core, seen = runner(llm), []
    native, propose = TreeState.begin_step, type(core.speculator).propose

    def begin_step(self, input_batch, *args) -> TreeStep:
        step = native(self, input_batch, *args)
        assert input_batch.positions.data_ptr() == core.input_buffers.positions.data_ptr()
        return step

    def watched(self, input_batch, *args, **kwargs):
        step = core.speculator.trees.step
        before = core.input_buffers.positions.clone()
        drafts = propose(self, input_batch, *args, **kwargs)
        if step is not None:
            by_depth = step.roots[step.requests] + step.topology.depths[step.requests, step.rows]
            sequential = step.roots[step.requests] + step.rows
            seen.append(not by_depth.equal(sequential))
            assert before[step.tokens].equal(by_depth)
            assert input_batch.positions[step.tokens].equal(sequential)
        return drafts

    monkeypatch.setattr(TreeState, "begin_step", begin_step)
    monkeypatch.setattr(type(core.speculator), "propose", watched)
    run(llm, prompts[1:3], SamplingParams(temperature=0, max_tokens=16))
    assert any(seen)
