"""Requests whose processing depends on their own text: along the paths of their trees, or on a chain beside trees."""

from types import SimpleNamespace

import pytest
from engine.engines import counted, dartree, engine, run, runner, tokens
from engine.extensions import CUSTOM_PROCESSOR
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from vllm_dartree import metrics
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


# What the model writes, several tokens each.
WORDS = [
    "cold-cable",
    "cold-carrier",
    "light_crate",
    "quick_carrier int",
    "quick_crate",
    "cyclic",
    "resize",
    "member: quiet",
]
ON_PATHS = {
    "repetition": {"repetition_penalty": 1.5},
    "presence and frequency": {"presence_penalty": 1.5, "frequency_penalty": 1.1},
    "penalties below neutral": {"repetition_penalty": 0.9, "frequency_penalty": -0.3},
    "bad words": {"bad_words": WORDS},
    "all": {"repetition_penalty": 1.1, "presence_penalty": 0.5, "bad_words": WORDS},
    "none": {},
}


@pytest.mark.slow
def test_trees_of_requests_that_look_at_their_own_text(prompts):
    """Tokens, and logprobs of what they were sampled from: a model this sure of itself forgives a wrong penalty."""
    warm, greedy = {"temperature": 1.2, "seed": 1}, {"temperature": 0}
    params = [
        SamplingParams(**ask, **keys, max_tokens=24, logprobs=8) for ask in (greedy, warm) for keys in ON_PATHS.values()
    ]
    # Prompts of odd numbers leave most to the model, so that paths leave the first rows of a tree.
    asked = prompts[1:24:2]
    settings = {"logprobs_mode": "processed_logprobs"}
    expected = run(engine(**settings), asked, params)
    trees = engine(dartree(), **settings)
    with counted(trees) as drafts:
        actual = run(trees, asked, params, arrive_every=1)
    assert tokens(actual) == tokens(expected)
    for ours, theirs in zip(actual, expected, strict=True):
        for step, plain in zip(ours.logprobs, theirs.logprobs, strict=True):
            possible = {token: logprob for token, logprob in plain.items() if logprob > float("-inf")}
            assert {token: step.get(token) for token in possible} == pytest.approx(possible, abs=1e-4)
    assert drafts.accepted > 0
    assert not runner(trees).speculator.trees.as_chain.any(), "some were drafted as chains"


def test_a_request_that_a_custom_processor_takes_is_drafted_as_a_chain_and_still_gains(prompts, monkeypatch):
    trees = engine(dartree(8, tree_width=4), logits_processors=[CUSTOM_PROCESSOR])
    state, seen = runner(trees).speculator.trees, []
    write = type(state).write

    def record(self, slots, tree):
        written = write(self, slots, tree)
        seen.append(self.parents[slots[0]].tolist())
        return written

    monkeypatch.setattr(type(state), "write", record)
    # The metric itself may belong to a newer engine.
    asked = []
    metric = SimpleNamespace(inc=lambda: asked.append(1))
    monkeypatch.setitem(metrics._chain_requests, metrics.CUSTOM_PROCESSORS, metric)
    with counted(trees) as drafts:
        run(trees, prompts[:1], SamplingParams(temperature=0, max_tokens=32))
    assert len(asked) == 1
    for parents in seen:
        length = sum(parent >= 0 for parent in parents) - 1
        assert parents == [0, *range(length), *[-1] * (len(parents) - 1 - length)]
    assert drafts.accepted > 0


def test_a_prompt_that_arrives_in_parts_is_refused(prompts):
    """What ``AsyncLLM`` asks for with each part. With vLLM 0.32's own chains such a session loses tokens."""

    def process(llm, *, resumable: bool):
        core = llm.llm_engine
        prompt = {"prompt_token_ids": prompts[0]}
        return core.input_processor.process_inputs(
            "0", prompt, SamplingParams(), supported_tasks=core.get_supported_tasks(), resumable=resumable
        )

    assert process(engine(), resumable=True).resumable
    trees = engine(dartree())
    assert not process(trees, resumable=False).resumable
    with pytest.raises(VLLMValidationError, match="streaming input, a prompt that arrives in parts; send the whole"):
        process(trees, resumable=True)
