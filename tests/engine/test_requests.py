"""Requests whose processing depends on their own text share a batch with trees, as chains."""

from engine.engines import counted, dartree, engine, run, runner, tokens
from vllm import SamplingParams

from vllm_dartree.engine import sampler as sampler_module


def test_logits_that_are_sampled_in_chunks(prompts, monkeypatch):
    params = [
        SamplingParams(temperature=1.0, top_p=0.9, seed=i, max_tokens=16, logprobs=2, repetition_penalty=1.0 + i / 10)
        for i in range(4)
    ]
    expected = run(engine(), prompts[:4], params)
    monkeypatch.setattr(sampler_module, "get_max_chunk_logits", lambda vocab_size: 20)
    actual = run(engine(dartree()), prompts[:4], params)
    assert tokens(actual) == tokens(expected)
    assert [len(one.logprobs) for one in actual] == [len(one.tokens) for one in expected]


def test_a_penalised_request_is_drafted_as_a_chain_and_still_gains(prompts):
    trees = engine(dartree())
    state, seen = runner(trees).speculator.trees, []
    write = type(state).write

    def record(self, slots, tree):
        written = write(self, slots, tree)
        seen.append(written.parents[0].tolist())
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
