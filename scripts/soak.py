"""Soak: random requests that arrive, share prefixes, are preempted and cancelled, with trees and without speculation.

``python scripts/soak.py --requests 5000 --minutes 60 --seed 1`` runs them on the bundled pair, in Triton's interpreter,
some seconds each, and prints what it has seen after each wave. ``tests/engine/test_soak.py`` runs a few dozen.
"""

import argparse
import gc
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams

WAVE = 16  # requests between two looks at an idle engine
# Bytes: the staging buffers of vLLM double when a step brings more tokens than any before, up to eight full requests.
STAGING = 32 << 10
END_OF_THINKING = 280  # the tiny target's token "):", which ends what engines.crowded takes for thinking
GRAMMARS = (
    {"regex": r"( [a-z_]{2,9}){1,9}"},
    {"choice": ["cold cable", "green carrier", "quick router"]},
    {"json": {"type": "array", "items": {"enum": ["cold", "green", "warm"]}, "minItems": 1, "maxItems": 4}},
)
# By chance one or more of these; each is a function of the random source.
ROW_LOCAL = (
    lambda rng: {"logit_bias": {rng.randrange(2, 1000): rng.uniform(-5, 5) for _ in range(4)}},
    lambda rng: {"allowed_token_ids": list(range(2, rng.randrange(300, 1000)))},
    lambda rng: {"stop_token_ids": [200, 272], "min_tokens": rng.randrange(12), "max_tokens": 24},
    lambda rng: {"stop": [rng.choice(["cable", "return", " (", "\n\n", "er"])]},
    lambda rng: {"ignore_eos": True, "logit_bias": {0: 8.0}},
    lambda rng: {"logprobs": rng.randrange(4)},
    lambda rng: {"logprob_token_ids": rng.sample(range(1000), 3)},
    lambda rng: {"prompt_logprobs": 1},
    lambda rng: {"thinking_token_budget": rng.randrange(12)},
)
PENALTIES = (
    lambda rng: {"repetition_penalty": rng.uniform(1.0, 1.5)},
    lambda rng: {"presence_penalty": rng.uniform(0, 2), "frequency_penalty": rng.uniform(0, 1)},
)


def _bad_words(rng: random.Random) -> dict[str, Any]:
    return {"bad_words": rng.sample(["cable", " str", "self", "return", "cold"], 2)}


WARM = (
    lambda rng: {"top_k": rng.randrange(1, 30)},
    lambda rng: {"top_p": rng.uniform(0.3, 1.0)},
    lambda rng: {"min_p": rng.uniform(0.0, 0.3)},
    lambda rng: {"n": 2},
)


@dataclass
class Request:
    """One request and its fate."""

    name: str
    prompt: list[int]
    params: dict[str, Any]
    priority: int
    gap: int  # steps between the arrival before and its own
    patience: int | None  # steps after which its client goes away

    def sampling_params(self) -> "SamplingParams":
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        grammar = self.params.get("structured_outputs")
        grammar = grammar and StructuredOutputsParams(**grammar)
        return SamplingParams(**self.params | {"structured_outputs": grammar})


def draw(rng: random.Random, text: list[int], number: int) -> Request:
    """A random request about ``text``, whose parts are its prompts."""
    start = rng.choice((0, 150, 300)) if rng.random() < 0.4 else rng.randrange(len(text) - 200)
    prompt = text[start : start + rng.choice((rng.randrange(4, 40), rng.randrange(100, 128), rng.randrange(128, 200)))]
    params: dict[str, Any] = {"temperature": 0, "max_tokens": rng.randrange(1, 40)}
    if rng.random() < 0.3:
        params |= {"temperature": rng.uniform(0.2, 1.5), "seed": number, "max_tokens": rng.randrange(1, 12)}
        params |= rng.choice(WARM)(rng)
    if rng.random() < 0.2:
        params["structured_outputs"] = rng.choice(GRAMMARS)
        prompt = [*prompt, END_OF_THINKING] if rng.random() < 0.7 else prompt
    elif rng.random() < 0.6:
        params |= rng.choice(ROW_LOCAL)(rng)
    if rng.random() < 0.3:
        # Not every grammar could go on without its words.
        params |= rng.choice(PENALTIES if "structured_outputs" in params else (*PENALTIES, _bad_words))(rng)
    patience = rng.randrange(1, 12) if rng.random() < 0.2 else None
    return Request(f"{number}", prompt, params, rng.randrange(3), rng.choice((0, 0, 0, 1, 2, 5)), patience)


@dataclass
class Answers:
    """What clients saw, by request and index of the completion."""

    tokens: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    reasons: dict[tuple[str, int], str | None] = field(default_factory=dict)
    logprobs: dict[tuple[str, int], int] = field(default_factory=dict)  # their number of rows
    steps: int = 0


def answer(llm: "LLM", requests: list[Request], *, clients_leave: bool) -> Answers:
    """Runs requests as they arrive; those whose client leaves are cancelled, if ``clients_leave``."""
    core, answers = llm.llm_engine, Answers()
    arrivals, due, leaving = list(requests), 0, {}
    while arrivals or core.has_unfinished_requests():
        while arrivals and answers.steps >= due + arrivals[0].gap:
            request = arrivals.pop(0)
            due = answers.steps
            prompt = {"prompt_token_ids": request.prompt}
            core.add_request(request.name, prompt, request.sampling_params(), priority=request.priority)
            if clients_leave and request.patience is not None:
                leaving[request.name] = answers.steps + request.patience
        for output in core.step():
            for completion in output.outputs:
                place = output.request_id, completion.index
                answers.tokens[place] = list(completion.token_ids)
                answers.reasons[place] = completion.finish_reason
                if completion.logprobs is not None:
                    answers.logprobs[place] = len(completion.logprobs)
        answers.steps += 1
        for name in [name for name, step in leaving.items() if step <= answers.steps]:
            core.abort_request([name])
            del leaving[name]
    return answers


@dataclass
class Idle:
    """What an engine holds while it has nothing to do."""

    free_blocks: int
    known_requests: int
    tensors: int
    tensor_bytes: int

    @classmethod
    def of(cls, llm: "LLM") -> "Idle":
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        gc.collect()
        tensors = [entry for entry in gc.get_objects() if issubclass(type(entry), torch.Tensor)]
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
        return cls(
            scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
            len(scheduler.requests) + len(llm.llm_engine.output_processor.request_states),
            len(tensors),
            sum(storages.values()),
        )


@dataclass
class Report:
    """What a soak has seen; ``problems`` says what should not have been."""

    seed: int
    requests: int = 0
    cancelled: int = 0
    tokens: int = 0
    rounds: int = 0
    accepted: int = 0
    preemptions: int = 0
    differences: list[str] = field(default_factory=list)
    idle: list[Idle] = field(default_factory=list)  # before the first wave and after each
    probes: list[tuple[int, int]] = field(default_factory=list)  # rounds and accepted nodes of the same requests

    def problems(self) -> list[str]:
        found = list(self.differences)
        first, middle, last = self.idle[0], self.idle[len(self.idle) // 2], self.idle[-1]
        if last.free_blocks != first.free_blocks:
            found.append(
                f"cache blocks leak: {first.free_blocks} were free at the start, {last.free_blocks} at the end"
            )
        if last.known_requests:
            found.append(f"{last.known_requests} requests are still known though all have ended")
        if last.tensors > middle.tensors or last.tensor_bytes > middle.tensor_bytes + STAGING:
            found.append(f"tensors leak: half way there were {middle}, at the end {last}")
        if len(set(self.probes)) > 1:
            found.append(
                f"the same requests took other rounds, or had other drafts accepted, as time went on: {self.probes}"
            )
        return found

    def __str__(self) -> str:
        return (
            f"seed {self.seed}: {self.requests} requests, {self.cancelled} of them cancelled, {self.tokens} tokens in "
            f"{self.rounds} verify rounds (tau {1 + self.accepted / max(self.rounds, 1):.2f}), {self.preemptions} "
            f"preemptions; {len(self.differences)} differences; {self.idle[-1]}; probes {self.probes[0]}"
        )


def soak(plain: "LLM", trees: "LLM", prompts: list[list[int]], num_requests: int, seed: int) -> Iterator[Report]:
    """Sends waves of random requests to both engines; yields the one report after each wave."""
    from engine.engines import counted, run
    from vllm import SamplingParams

    rng, report = random.Random(seed), Report(seed)
    text = [token for prompt in prompts for token in prompt]
    report.idle.append(Idle.of(trees))
    while report.requests < num_requests:
        count = min(WAVE, num_requests - report.requests)
        requests = [draw(rng, text, report.requests + i) for i in range(count)]
        expected = answer(plain, requests, clients_leave=False)
        with counted(trees) as drafts:
            actual = answer(trees, requests, clients_leave=True)
        for request in requests:
            report.differences += _differences(request, actual, expected)
        report.requests += count
        report.cancelled += sum(request.patience is not None for request in requests)
        report.tokens += sum(map(len, actual.tokens.values()))
        report.rounds += drafts.rounds
        report.accepted += drafts.accepted
        report.preemptions += drafts.preemptions
        with counted(trees) as drafts:
            run(trees, prompts[:2], SamplingParams(temperature=0, max_tokens=16))
        report.probes.append((drafts.rounds, drafts.accepted))
        report.idle.append(Idle.of(trees))
        yield report


def _differences(request: Request, actual: Answers, expected: Answers) -> Iterator[str]:
    for index in range(request.params.get("n", 1)):
        place = request.name, index
        tokens, wanted = actual.tokens.get(place, []), expected.tokens[place]
        finished = actual.reasons.get(place) is not None
        if finished or request.patience is None:
            same = (tokens, actual.reasons.get(place)) == (wanted, expected.reasons[place])
        else:
            same = tokens == wanted[: len(tokens)]
        if actual.logprobs.get(place, len(tokens)) != len(tokens):
            same = False
        if not same:
            yield f"{request}, completion {index}: {tokens}, expected {wanted}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=1000, help="how many (default %(default)s)")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after which no new wave begins")
    parser.add_argument("--seed", type=int, default=0, help="of the random requests (default %(default)s)")
    arguments = parser.parse_args()
    if arguments.requests < 1:
        parser.error(f"--requests is {arguments.requests}, but it must be at least 1")
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    from vllm_dartree.emulation import activate

    activate()
    from engine.engines import crowded

    from vllm_dartree.assets import DOMINO, PROMPTS, TARGET

    plain, trees = crowded(str(TARGET), str(DOMINO))
    prompts = [json.loads(line)["prompt_token_ids"] for line in PROMPTS.read_text().splitlines()]
    end = time.monotonic() + 60 * arguments.minutes
    for report in soak(plain, trees, prompts, arguments.requests, arguments.seed):
        print(report, flush=True)
        if time.monotonic() >= end:
            break
    sys.exit("\n".join(report.problems()) or None)


if __name__ == "__main__":
    main()
