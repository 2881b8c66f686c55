"""Requests whose processing depends on their own text share a batch with trees, as chains."""

import pytest
from engine.engines import counted, dartree, engine, run, runner, tokens
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from vllm_dartree.engine import sampler as sampler_module

MIXED = [
    SamplingParams(temperature=0, max_tokens=32),
    SamplingParams(temperature=0, max_tokens=32, repetition_penalty=1.2),
    SamplingParams(temperature=0.8, seed=3, max_tokens=32, presence_penalty=0.5, frequency_penalty=0.3),
    SamplingParams(temperature=0, max_tokens=32, min_tokens=20, stop_token_ids=[10]),
    SamplingParams(temperature=1.0, seed=5, max_tokens=32, allowed_token_ids=list(range(2, 500))),
    SamplingParams(temperature=0, max_tokens=32),
    SamplingParams(temperature=1.0, seed=6, max_tokens=32, min_p=0.05),
    SamplingParams(temperature=0, max_tokens=32, logit_bias={200: -3.0, 4: 2.0}),
]


def test_penalties_and_plain_requests_in_one_batch(prompts):
    expected = tokens(run(engine(), prompts[: len(MIXED)], MIXED))
    trees = engine(dartree())
    assert tokens(run(trees, prompts[: len(MIXED)], MIXED)) == expected
    assert tokens(run(trees, prompts[: len(MIXED)], MIXED, arrive_every=3)) == expected


@pytest.mark.parametrize("max_rows", [10_000, 20], ids=["in one piece", "in chunks"])
def test_logprobs_are_those_of_the_path(prompts, monkeypatch, max_rows):
    """Right rows, right shapes, nothing past a stop; whether the logits are sampled in one piece or in chunks."""
    ask = {"temperature": 0, "max_tokens": 16}
    params = [
        SamplingParams(**ask, logprobs=2),
        SamplingParams(**ask, logprobs=0, repetition_penalty=1.3),
        SamplingParams(**ask, logprob_token_ids=[7, 40, 300]),
        SamplingParams(**ask),
        SamplingParams(temperature=1.0, top_p=0.9, seed=4, max_tokens=16, logprobs=3),
    ]
    expected = run(engine(), prompts[:5], params)
    monkeypatch.setattr(sampler_module, "get_max_chunk_logits", lambda vocab_size: max_rows)
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
        seen.append(written.parents[0].tolist())
        return written

    type(state).write = record
    try:
        with counted(trees) as drafts:
            run(trees, prompts[:1], MIXED[1])
    finally:
        type(state).write = write
    for parents in seen:
        length = sum(parent >= 0 for parent in parents) - 1
        assert parents == [0, *range(length), *[-1] * (len(parents) - 1 - length)]
    assert drafts.accepted > 0


@pytest.mark.slow
def test_a_grammar_beside_plain_requests(prompts):
    choice = StructuredOutputsParams(regex=r"class [A-Z][a-z]{3,12}:\n    pass\n")
    params = [SamplingParams(temperature=0, max_tokens=24, structured_outputs=choice), MIXED[0], MIXED[2]]
    settings = {"max_num_seqs": 4}
    expected = run(engine(**settings), prompts[:3], params)
    actual = run(engine(dartree(), **settings), prompts[:3], params)
    assert tokens(actual) == tokens(expected)
