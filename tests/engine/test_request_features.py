"""Whatever a request asks for, it gets what it gets without speculation: tokens, logprobs, reasons and counts.

All features of a table share a batch, so that each runs beside all others; a test per feature looks at its request.
"""

from dataclasses import dataclass

import pytest
from engine.engines import counted, dartree, engine, outputs, runner
from engine.extensions import CUSTOM_PROCESSOR, END_OF_THINKING
from vllm import RequestOutput, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

pytestmark = pytest.mark.slow

DRAFTS = dartree(8, tree_width=4)
STRING, END = 272, 0  # the tokens ' "' and <|endoftext|>


@dataclass(frozen=True)
class Feature:
    """A request, and how it differs from the same one without the feature."""

    prompt: int  # number of a bundled prompt
    with_it: dict[str, object]
    without_it: dict[str, object]  # None: the parameter is left out
    suffix: tuple[int, ...] = ()  # tokens behind the prompt

    def params(self, active: bool = True) -> SamplingParams:
        keys = {"temperature": 0, "max_tokens": 16, "output_kind": RequestOutputKind.FINAL_ONLY} | self.with_it
        if not active:
            keys |= self.without_it
        return SamplingParams(**{key: value for key, value in keys.items() if value is not None})


def _warm(seed: int) -> dict[str, object]:
    return {"temperature": 1.3, "seed": seed, "max_tokens": 12}


# Prompts of odd numbers leave most to the model; 1, 5 and 15 start texts like ' --cold-cable str "cable" (next ...'.
FEATURES = {
    "temperature": Feature(1, {"temperature": 0.8, "seed": 1}, {"temperature": 0}),
    "seed": Feature(3, _warm(1), {"seed": 2}),
    "top_k": Feature(7, _warm(3) | {"top_k": 2}, {"top_k": None}),
    "top_p": Feature(9, _warm(4) | {"top_p": 0.3}, {"top_p": None}),
    "min_p": Feature(11, _warm(5) | {"min_p": 0.4}, {"min_p": None}),
    "allowed_token_ids": Feature(5, {"allowed_token_ids": list(range(2, 400))}, {"allowed_token_ids": None}),
    "logit_bias": Feature(1, {"logit_bias": {STRING: -100.0, 4: 2.0}}, {"logit_bias": None}),
    "stop_token_ids": Feature(5, {"stop_token_ids": [STRING]}, {"stop_token_ids": None}),
    "min_tokens": Feature(15, {"stop_token_ids": [STRING], "min_tokens": 12}, {"min_tokens": 0}),
    "stop": Feature(15, {"stop": [" (next"], "max_tokens": 32}, {"stop": None}),
    "include_stop_str_in_output": Feature(
        5,
        {"stop": [" (next"], "max_tokens": 32, "include_stop_str_in_output": True},
        {"include_stop_str_in_output": False},
    ),
    "ignore_eos": Feature(13, {"ignore_eos": True, "logit_bias": {END: 12.0}}, {"ignore_eos": False}),
    "n": Feature(3, _warm(6) | {"n": 3}, {"n": 1}),
    "logprobs": Feature(1, {"logprobs": 3}, {"logprobs": 2}),
    "logprobs of the tokens alone": Feature(3, _warm(7) | {"logprobs": 0}, {"logprobs": None}),
    "logprobs up to a stop string": Feature(15, {"logprobs": 2, "stop": [" (next"], "max_tokens": 32}, {"stop": None}),
    "flat_logprobs": Feature(5, {"logprobs": 1, "flat_logprobs": True}, {"logprobs": 2}),
    "logprob_token_ids": Feature(7, {"logprob_token_ids": [5, 4, STRING]}, {"logprob_token_ids": [5, 4]}),
    "logprobs with logprob_token_ids": Feature(
        9, {"logprobs": 3, "logprob_token_ids": [5, 4, STRING]}, {"logprob_token_ids": None}
    ),
    "prompt_logprobs": Feature(4, {"prompt_logprobs": 2, "max_tokens": 4}, {"prompt_logprobs": None}),
    "prompt_logprob_token_ids": Feature(
        9, {"prompt_logprob_token_ids": [[4, 5]] * 10, "max_tokens": 4}, {"prompt_logprob_token_ids": None}
    ),
    "skip_special_tokens": Feature(
        13, {"ignore_eos": True, "logit_bias": {END: 12.0}, "skip_special_tokens": False}, {"skip_special_tokens": True}
    ),
    "detokenize": Feature(7, {"detokenize": False}, {"detokenize": True}),
    "repetition_penalty": Feature(11, {"repetition_penalty": 1.3}, {"repetition_penalty": None}),
    "presence_penalty": Feature(7, {"presence_penalty": 1.5}, {"presence_penalty": None}),
    "frequency_penalty": Feature(9, {"frequency_penalty": 1.8}, {"frequency_penalty": None}),
    "bad_words": Feature(5, {"bad_words": [" str", "cable"]}, {"bad_words": None}),
    "all of them with logprobs": Feature(
        13,
        {"repetition_penalty": 1.1, "frequency_penalty": 0.5, "bad_words": ["_"], "logprobs": 2},
        {"repetition_penalty": None},
    ),
}

ARRAY = {"type": "array", "items": {"enum": ["cold", "green", "warm"]}, "minItems": 2, "maxItems": 4}


def _bound(**grammar: object) -> dict[str, object]:
    return {"structured_outputs": StructuredOutputsParams(**grammar), "max_tokens": 24}


FREE = {"structured_outputs": None}
# Prompts 2 and 6 end with the token "def", which starts the thinking.
WITH_REASONING = {
    "json_object": Feature(1, _bound(json_object=True), FREE, (END_OF_THINKING,)),
    "json": Feature(5, _bound(json=ARRAY), FREE, (END_OF_THINKING,)),
    "regex": Feature(15, _bound(regex=r" --[a-z]{3,8}-[a-z]{3,8} str "), FREE, (END_OF_THINKING,)),
    "choice": Feature(3, _bound(choice=["cold cable", "green carrier", "quick router"]), FREE, (END_OF_THINKING,)),
    "a grammar with sampling and penalties": Feature(
        9, _bound(regex=r"( [a-z_]{3,9}){3,9}") | _warm(9) | {"repetition_penalty": 1.2}, FREE, (END_OF_THINKING,)
    ),
    "a grammar after thinking": Feature(2, _bound(regex=r"\n    pass\n\n\ndef [a-z]{3,9}"), FREE),
    "thinking_token_budget": Feature(6, {"thinking_token_budget": 3}, {"thinking_token_budget": None}),
    "a thinking budget that is not used up": Feature(
        2, {"thinking_token_budget": 30, "stop": ["return"]}, {"stop": None}
    ),
    "a grammar after a thinking budget": Feature(
        6, _bound(regex=r" -> [a-z]{3,9}:\n") | {"thinking_token_budget": 4}, FREE
    ),
    "processed_logprobs": Feature(7, _warm(10) | {"top_k": 3, "logprobs": 4}, {"top_k": None}),
    "processed_logprobs of a grammar": Feature(
        11, _bound(choice=["member", "option"]) | {"logprobs": 2}, FREE, (END_OF_THINKING,)
    ),
}


def assert_same(actual: RequestOutput, expected: RequestOutput) -> None:
    """What a client sees of both is the same; logprobs within what float32 leaves open."""
    assert actual.prompt_token_ids == expected.prompt_token_ids
    assert len(actual.outputs) == len(expected.outputs)
    _assert_same_logprobs(actual.prompt_logprobs, expected.prompt_logprobs)
    assert (actual.prompt_token_id_logprobs is None) == (expected.prompt_token_id_logprobs is None)
    if expected.prompt_token_id_logprobs is not None:
        assert actual.prompt_token_id_logprobs == pytest.approx(expected.prompt_token_id_logprobs, abs=1e-3)
    for one, other in zip(actual.outputs, expected.outputs, strict=True):
        assert list(one.token_ids) == list(other.token_ids)
        assert one.text == other.text
        assert (one.finish_reason, one.stop_reason) == (other.finish_reason, other.stop_reason)
        _assert_same_logprobs(one.logprobs, other.logprobs)
        if other.logprobs is not None:
            assert len(one.logprobs) == len(one.token_ids)
            assert one.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-2)


def _assert_same_logprobs(actual, expected) -> None:
    assert (actual is None) == (expected is None)
    for one, other in zip(actual or (), expected or (), strict=True):
        assert (one is None) == (other is None)
        if other is None:  # the first token of a prompt
            continue
        # Among tokens that a mask excludes, no order is promised.
        possible = {token for token, entry in other.items() if entry.logprob > float("-inf")}
        assert {token for token, entry in one.items() if entry.logprob > float("-inf")} == possible
        for token in possible:
            assert one[token].logprob == pytest.approx(other[token].logprob, abs=1e-3)
            assert (one[token].rank, one[token].decoded_token) == (other[token].rank, other[token].decoded_token)


def _differ(one: RequestOutput, other: RequestOutput) -> bool:
    try:
        assert_same(one, other)
    except AssertionError:
        return True
    return False


def _run(llm, prompts, features: dict[str, Feature], active: bool = True, **how) -> dict[str, RequestOutput]:
    asked = [prompts[feature.prompt] + list(feature.suffix) for feature in features.values()]
    params = [feature.params(active) for feature in features.values()]
    return dict(zip(features, outputs(llm, asked, params, **how), strict=True))


class Batches:
    """Outputs by feature, of batches of all features of a table."""

    def __init__(self, plain, trees, prompts, features: dict[str, Feature]) -> None:
        self.without_it = _run(plain, prompts, features, active=False)
        self.expected = _run(plain, prompts, features)
        # Requests join and leave at every step.
        with counted(trees) as self.drafts:
            self.actual = _run(trees, prompts, features, arrive_every=1)

    def check(self, name: str) -> None:
        assert _differ(self.expected[name], self.without_it[name]), "the feature changes nothing"
        assert_same(self.actual[name], self.expected[name])


@pytest.fixture(scope="module")
def batches(prompts):
    return Batches(engine(), engine(DRAFTS), prompts, FEATURES)


@pytest.mark.parametrize("name", FEATURES)
def test_feature(name, batches):
    batches.check(name)


def test_features_leave_drafts_their_worth(batches):
    assert batches.drafts.tau > 2


@pytest.fixture(scope="module")
def crowded_batches(crowded_engines, prompts):
    return Batches(*crowded_engines, prompts, WITH_REASONING)


@pytest.mark.parametrize("name", WITH_REASONING)
def test_feature_beside_reasoning(name, crowded_batches):
    crowded_batches.check(name)


def test_custom_logits_processors(prompts):
    params = [
        SamplingParams(temperature=0, max_tokens=12, logprobs=2),
        SamplingParams(temperature=0, max_tokens=12, repetition_penalty=1.2),
        SamplingParams(temperature=1.0, seed=1, max_tokens=8),
        SamplingParams(temperature=0, max_tokens=24, extra_args={"no_echo": True}),
    ]
    settings = {"logits_processors": [CUSTOM_PROCESSOR]}
    asked = prompts[1:8:2]
    expected = outputs(engine(**settings), asked, params)
    without_it = outputs(engine(), asked, params)
    trees = engine(DRAFTS, **settings)
    with counted(trees) as drafts:
        actual = outputs(trees, asked, params, arrive_every=1)
    for one, other, plain, asks in zip(actual, expected, without_it, params, strict=True):
        assert_same(one, other)
        assert _differ(other, plain) == (asks.extra_args is None), "it changes those that it takes"
    assert drafts.accepted > 0
    # Slots are given out anew; no more than the three that it took were drafted as chains.
    as_chain = runner(trees).speculator.trees.as_chain
    assert 0 < as_chain.sum() <= 3


def test_logprob_token_ids_of_another_number_than_logprobs_are_refused_with_a_reason(prompts):
    params = SamplingParams(logprobs=5, logprob_token_ids=[1, 2, 3])
    for llm in (engine(), engine(DRAFTS)):
        with pytest.raises(VLLMValidationError, match=r"logprobs must equal len\(logprob_token_ids\)"):
            outputs(llm, prompts[:1], params)


def test_prompt_logprobs_of_a_prompt_in_chunks_beside_trees(prompts):
    long = [token for prompt in prompts[:24] for token in prompt][:300]
    params = [SamplingParams(temperature=0, max_tokens=24)] * 2
    params.append(SamplingParams(temperature=0, max_tokens=8, prompt_logprobs=2, logprobs=1))
    asked = [*prompts[:2], long]
    settings = {"max_num_batched_tokens": 96, "max_num_seqs": 8}
    expected = outputs(engine(), asked, params)
    actual = outputs(engine(dartree(), **settings), asked, params, arrive_every=1)
    for one, other in zip(actual, expected, strict=True):
        assert_same(one, other)
    assert len(actual[2].prompt_logprobs) == len(long)


def test_a_stream_that_is_cancelled_leaves_the_others_as_they_are(prompts):
    params = SamplingParams(temperature=0, max_tokens=32, output_kind=RequestOutputKind.DELTA)
    expected = outputs(engine(), prompts[:4], SamplingParams(temperature=0, max_tokens=32))
    trees = engine(DRAFTS)
    core, streams, cancelled = trees.llm_engine, {str(i): [] for i in range(4)}, {"1": 5, "2": 12}
    for number in range(4):
        core.add_request(str(number), {"prompt_token_ids": prompts[number]}, params)
    while core.has_unfinished_requests():
        for output in core.step():
            assert output.request_id in streams, "a cancelled request went on"
            streams[output.request_id] += output.outputs[0].token_ids
        for name, length in list(cancelled.items()):
            if len(streams[name]) >= length:
                core.abort_request([name])
                del cancelled[name]
    assert not cancelled
    for (name, tokens), other in zip(streams.items(), expected, strict=True):
        whole = list(other.outputs[0].token_ids)
        if name in ("1", "2"):
            assert len(tokens) < len(whole)
            whole = whole[: len(tokens)]
        assert tokens == whole
