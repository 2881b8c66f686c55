"""What happens to a server, and what an operator counts on: no client can harm another one."""

import json
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import requests
from engine.engines import counted, dartree, engine, run, tokens
from engine.servers import server
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

pytestmark = pytest.mark.slow

COLOURS = {"json": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 2, "maxItems": 4}}


@pytest.fixture(scope="module")
def served():
    with server(dartree(), "--shutdown-timeout", "120") as running:
        yield running


@pytest.fixture(scope="module")
def client(served):
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", timeout=400, max_retries=0)


def ask(client, prompt: list[int], max_tokens: int = 16, **keys: object):
    extra = {"return_token_ids": True} | keys.pop("extra_body", {})
    keys = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0} | keys
    return client.completions.create(**keys, extra_body=extra)


def expected(prompts: list[list[int]], max_tokens: int = 16, **keys: object) -> list[list[int]]:
    params = SamplingParams(**{"temperature": 0, "max_tokens": max_tokens} | keys)
    return tokens(run(engine(), prompts, params))


# --- What it answers -------------------------------------------------------------------------------------------------


def test_streaming_and_not_and_16_at_once(served, client, prompts):
    wanted = expected(prompts[:16], 24)
    counters = [f"vllm:spec_decode_num_{name}_total" for name in ("drafts", "accepted_tokens")]
    before = [served.metric(name) for name in counters]

    def complete(number: int) -> list[int]:
        if number % 2:
            chunks = ask(client, prompts[number], 24, stream=True)
            return [token for chunk in chunks for token in chunk.choices[0].token_ids or []]
        return ask(client, prompts[number], 24).choices[0].token_ids

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(complete, range(16))) == wanted
    drafted, accepted = (served.metric(name) - old for name, old in zip(counters, before, strict=True))
    trees = engine(dartree())
    with counted(trees) as counts:
        run(trees, prompts[:16], SamplingParams(temperature=0, max_tokens=24))
    assert (drafted, accepted) == (counts.rounds, counts.accepted)


def test_usage_counts(client, prompts):
    wanted = expected(prompts[:2])
    answer = ask(client, prompts[0])
    assert answer.choices[0].token_ids == wanted[0]
    assert answer.usage.prompt_tokens == len(prompts[0])
    assert answer.usage.completion_tokens == len(wanted[0])
    options = {"include_usage": True, "continuous_usage_stats": True}
    seen, usages = [], []
    for chunk in ask(client, prompts[1], stream=True, stream_options=options):
        seen += [token for choice in chunk.choices for token in choice.token_ids or []]
        usages.append(chunk.usage)
        assert chunk.usage.completion_tokens == len(seen)
    assert seen == wanted[1]
    assert usages[-1].prompt_tokens == len(prompts[1])
    # Several tokens arrive in one chunk, or nothing was accepted.
    assert len(usages) < len(seen)


def test_echo_with_logprobs(client, prompts):
    prompt = prompts[0]
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=2, prompt_logprobs=2)
    output = engine().generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)[0]
    steps = [*output.prompt_logprobs, *output.outputs[0].logprobs]
    said = [*prompt, *output.outputs[0].token_ids]
    answer = ask(client, prompt, 12, echo=True, logprobs=2).choices[0]
    assert answer.logprobs.token_logprobs[0] is None
    assert len(answer.logprobs.token_logprobs) == len(answer.logprobs.tokens) == len(said)
    for i in range(1, len(said)):
        assert answer.logprobs.token_logprobs[i] == pytest.approx(steps[i][said[i]].logprob, abs=1e-3)
        assert len(answer.logprobs.top_logprobs[i]) >= 2


def test_logprobs_of_given_tokens(client, prompts):
    wanted = (
        engine()
        .generate(
            [{"prompt_token_ids": prompts[0]}],
            SamplingParams(temperature=0, max_tokens=12, logprob_token_ids=[5, 200]),
            use_tqdm=False,
        )[0]
        .outputs[0]
    )
    extra = {"logprob_token_ids": [5, 200], "return_tokens_as_token_ids": True}
    answer = ask(client, prompts[0], 12, logprobs=1, extra_body=extra).choices[0]
    assert answer.token_ids == list(wanted.token_ids)
    for seen, step in zip(answer.logprobs.top_logprobs, wanted.logprobs, strict=True):
        for token in (5, 200):
            assert seen[f"token_id:{token}"] == pytest.approx(step[token].logprob, abs=1e-3)


def test_structured_output_parses_when_it_is_streamed(client, prompts):
    # Left to its own choice, the model puts white space into the array for ever.
    sampling = {"temperature": 1.2, "seed": 6}
    wanted = expected(prompts[:1], 60, structured_outputs=StructuredOutputsParams(**COLOURS), **sampling)[0]
    chunks = list(ask(client, prompts[0], 60, stream=True, extra_body={"structured_outputs": COLOURS}, **sampling))
    assert [token for chunk in chunks for token in chunk.choices[0].token_ids or []] == wanted
    colours = json.loads("".join(chunk.choices[0].text for chunk in chunks))
    assert 2 <= len(colours) <= 4
    assert {"red", "green", "blue"}.issuperset(colours)


# --- What is done to it ----------------------------------------------------------------------------------------------

WRONG = {
    "no JSON": (b"{not json", "json"),
    "a list": (b"[1, 2]", "dict"),
    "another model": ({"model": "huge"}, "huge"),
    "no prompt": ({"prompt": None}, "prompt"),
    "an empty prompt": ({"prompt": []}, "prompt"),
    "a token that there is not": ({"prompt": [5, 99999]}, "99999"),
    "a prompt that is too long": ({"prompt": [5] * 600}, "512"),
    "more tokens than there is room for": ({"max_tokens": 100_000}, "max"),
    "fewer than no tokens": ({"max_tokens": -1}, "max_tokens"),
    "words for numbers": ({"temperature": "hot"}, "temperature"),
    "a negative temperature": ({"temperature": -1}, "temperature"),
    "a temperature that is no number": (b'{"model": "tiny", "prompt": [5], "temperature": NaN}', ""),
    "top_p above one": ({"top_p": 2}, "top_p"),
    "top_k below -1": ({"top_k": -5}, "top_k"),
    "min_p above one": ({"min_p": 3}, "min_p"),
    "no repetition penalty": ({"repetition_penalty": 0}, "repetition_penalty"),
    "a penalty beyond its bounds": ({"presence_penalty": 9}, "presence_penalty"),
    "a bias for a token that there is not": ({"logit_bias": {"99999": 1}}, "99999"),
    "no samples": ({"n": 0}, "n must"),
    "a million logprobs": ({"logprobs": 1_000_000}, "logprobs"),
    "ids without logprobs": ({"logprob_token_ids": [3]}, "logprob_token_ids"),
    "a schema that is none": ({"structured_outputs": {"json": {"type": "nonsense"}}}, ""),
    "a pattern that is none": ({"structured_outputs": {"regex": "(["}}, ""),
    "a seed that is too large": ({"seed": 2**70}, "seed"),
    "stop strings that are none": ({"stop": {"a": 1}}, "stop"),
}


def test_absurd_requests_are_refused_with_a_reason_and_harm_nobody(served, client, prompts):
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(ask, client, prompts[0], 100)
        for name, (change, word) in WRONG.items():
            body = change
            if isinstance(change, dict):
                body = json.dumps({"model": "tiny", "prompt": prompts[0], "max_tokens": 4} | change)
            headers = {"Content-Type": "application/json"}
            answer = requests.post(f"{served.url}/v1/completions", data=body, headers=headers, timeout=60)
            assert 400 <= answer.status_code < 500, f"{name}: {answer.status_code} {answer.text}"
            assert word.lower() in answer.json()["error"]["message"].lower(), f"{name}: {answer.text}"
        assert other.result().choices[0].token_ids == expected(prompts[:1], 100)[0]
    assert requests.get(f"{served.url}/v1/nothing", timeout=60).status_code == 404
    assert served.process.poll() is None


STREAMING_CLIENT = """
import http.client, sys
connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=300)
connection.request("POST", "/v1/completions", sys.argv[2], {"Content-Type": "application/json"})
for line in connection.getresponse():
    print(line.decode(), end="", flush=True)
"""


def test_a_client_that_is_killed_mid_stream(served, client, prompts):
    body = {"model": "tiny", "prompt": prompts[1], "max_tokens": 450, "ignore_eos": True, "stream": True}
    command = [sys.executable, "-c", STREAMING_CLIENT, served.url.rpartition(":")[2], json.dumps(body)]
    with ThreadPoolExecutor(1) as pool:
        victims = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
        try:
            for victim in victims:
                assert victim.stdout.readline().startswith("data: ")
            other = pool.submit(ask, client, prompts[0], 64)
        finally:
            for victim in victims:
                victim.kill()
                victim.communicate()
        assert other.result().choices[0].token_ids == expected(prompts[:1], 64)[0]
    deadline = time.monotonic() + 60
    while served.metric("vllm:num_requests_running") or served.metric("vllm:kv_cache_usage_perc"):
        assert time.monotonic() < deadline, "a dead client's request runs on"
        time.sleep(0.2)
    assert ask(client, prompts[0]).choices[0].token_ids == expected(prompts[:1])[0]


def test_200_connections_at_once(served, client, prompts):
    wanted = expected(prompts[:20], 6)
    with ThreadPoolExecutor(200) as pool:
        answers = list(pool.map(lambda i: ask(client, prompts[i % 20], 6), range(200)))
    assert [answer.choices[0].token_ids for answer in answers] == wanted * 10
    assert served.metric("vllm:num_requests_running") == served.metric("vllm:num_requests_waiting") == 0


def test_sigterm_lets_requests_finish(served, client, prompts):
    """The last of this file, since the server is gone after it."""
    wanted = expected(prompts[:3], 200, ignore_eos=True)
    running = threading.Barrier(4)

    def stream(prompt: list[int]) -> list[int]:
        seen: list[int] = []
        for chunk in ask(client, prompt, 200, stream=True, extra_body={"ignore_eos": True}):
            begins, seen = not seen, seen + (chunk.choices[0].token_ids or [])
            if begins and seen:
                running.wait(300)
        return seen

    with ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(stream, prompt) for prompt in prompts[:3]]
        running.wait(300)
        served.process.send_signal(signal.SIGTERM)
        assert [answer.result() for answer in answers] == wanted
    assert served.process.wait(60) == 0
    with pytest.raises(openai.APIConnectionError):
        ask(client, prompts[0])
