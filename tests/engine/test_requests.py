"""Requests whose processing depends on their own text share a batch with trees, as chains."""

import pytest
from engine.engines import counted, dartree, engine, run, runner, tokens
from vllm import SamplingParams

from vllm_dartree.engine import sampler as sampler_module


def test_logprobs_of_logits_that_are_sampled_in_chunks(prompts, monkeypatch):
    """Those of the path, as everywhere (``test_request_features``)."""
    ask = {"temperature": 0, "max_tokens": 16}
    params = [
        SamplingParams(**ask, logprobs=2),
        SamplingParams(**ask, logprobs=0, repetition_penalty=1.3),
        SamplingParams(**ask, logprob_token_ids=[7, 40, 300]),
        SamplingParams(**ask),
        SamplingParams(temperature=1.0, top_p=0.9, seed=4, max_tokens=16, logprobs=3),
    ]
    expected = run(engine(), prompts[:5], params)
    monkeypatch.setattr(sampler_module, "get_max_chunk_logits", lambda vocab_size: 20)
    actual = run(engine(dartree()), prompts[:5], params)
    assert tokens(actual) == tokens(expected)
    for ours, theirs in zip(actual, expected, strict=True):
        if theirs.logprobs is None:
            assert ours.logprobs is None
            continue
        assert len(ours.logprobs) == len(ours.tokens)
        for step, plain in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert step == pytest.approx(plain, abs=1e-4)


def test_a_penalised_request_is_drafted_as_a_chain_and_still_gains(prompts):
    trees = engine(dartree())
    state, seen = runner(trees).speculator.trees, []
    write = type(state).write

    def record(self, slots, tree):
        written = write(self, slots, tree)
        seen.append(self.parents[slots[0]].tolist())
        return written

    type(state).write = record
    try:
        with counted(trees) as drafts:
            run(trees, prompts[:1], SamplingParams(temperature=0, max_tokens=32, repetition_penalty=1.2))
    finally:
        type(state).write = write
    for parents in seen:
        length = sum(parent >= 0 for parent in parents) - 1
        assert parents == [0, *range(length), *[-1] * (len(parents) - 1 - length)]
    assert drafts.accepted > 0
