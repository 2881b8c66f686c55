"""Starting engines and running requests through them, step by step where a test needs to."""

import functools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from engine.extensions import REASONING_PARSER
from vllm import LLM, RequestOutput, SamplingParams
from vllm.config import VllmConfig
from vllm.platforms.cpu import CpuPlatform

from vllm_dartree.assets import DOMINO, TARGET


def dartree(budget: int = 16, model: str = str(DOMINO), **keys: object) -> dict[str, object]:
    """A ``speculative_config`` with a budget that the interpreter can afford."""
    return {"method": "dartree", "model": model, "num_speculative_tokens": budget, **keys}


def engine(speculative: dict[str, object] | None = None, **settings: object) -> LLM:
    """The engine with these settings; equal settings share one."""
    return _engine(json.dumps(speculative, sort_keys=True), json.dumps(settings, sort_keys=True))


@functools.cache
def _engine(speculative: str, settings: str) -> LLM:
    defaults = {
        "model": str(TARGET),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 2048,
        "kv_cache_memory_bytes": 64 << 20,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
    }
    return LLM(**defaults | json.loads(settings), speculative_config=json.loads(speculative))


@contextmanager
def asynchronous_scheduling() -> Iterator[None]:
    """Lets engines that are started within it, and ask for it, schedule asynchronously, as on a GPU: vLLM would not
    on a CPU."""
    check = CpuPlatform.check_and_update_config

    def check_and_keep(vllm_config: VllmConfig) -> None:
        asked = vllm_config.scheduler_config.async_scheduling
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = asked

    CpuPlatform.check_and_update_config = staticmethod(check_and_keep)
    try:
        yield
    finally:
        CpuPlatform.check_and_update_config = staticmethod(check)


def crowded(target: str, drafter: str) -> tuple[LLM, LLM]:
    """Engines that know reasoning: one without speculation, and one with trees, with six cache blocks for eight
    requests and with asynchronous scheduling."""
    settings = {
        "model": target,
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 128,
        "logprobs_mode": "processed_logprobs",
        "reasoning_parser": REASONING_PARSER,
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
    }
    scarce = {"kv_cache_memory_bytes": 3 << 20, "scheduling_policy": "priority", "enable_prefix_caching": True}
    with asynchronous_scheduling():
        trees = engine(dartree(8, drafter, tree_width=4), **settings | scarce, async_scheduling=True)
    assert trees.llm_engine.vllm_config.scheduler_config.async_scheduling
    return engine(**settings), trees


@dataclass
class Finished:
    """What a client sees of one request."""

    tokens: list[int]
    finish_reason: str
    logprobs: list[dict[int, float]] | None


def _finished(output: RequestOutput) -> Finished:
    completion = output.outputs[0]
    logprobs = None
    if completion.logprobs is not None:
        logprobs = [{token: entry.logprob for token, entry in step.items()} for step in completion.logprobs]
    return Finished(list(completion.token_ids), completion.finish_reason, logprobs)


def run(
    llm: LLM, prompts: list[list[int]], params: SamplingParams | list[SamplingParams], arrive_every: int = 0
) -> list[Finished]:
    """``outputs``, and of them what most tests ask for."""
    return [_finished(output) for output in outputs(llm, prompts, params, arrive_every)]


def outputs(
    llm: LLM, prompts: list[list[int]], params: SamplingParams | list[SamplingParams], arrive_every: int = 0
) -> list[RequestOutput]:
    """Runs all prompts to their end.

    Args:
        arrive_every: engine steps between the arrivals of two requests; 0 lets all arrive at once.
    """
    many = params if isinstance(params, list) else [params] * len(prompts)
    waiting = [({"prompt_token_ids": prompt}, p) for prompt, p in zip(prompts, many, strict=True)]
    finished: dict[str, RequestOutput] = {}
    step = 0
    core = llm.llm_engine
    while waiting or core.has_unfinished_requests():
        while waiting and (not arrive_every or step >= arrive_every * (len(prompts) - len(waiting))):
            number = len(prompts) - len(waiting)
            core.add_request(str(number), *waiting.pop(0))
        for output in core.step():
            if output.finished:
                finished[output.request_id] = output
        step += 1
    return [finished[str(number)] for number in range(len(prompts))]


def tokens(finished: list[Finished]) -> list[list[int]]:
    return [one.tokens for one in finished]


@dataclass
class Drafts:
    """Differences of vLLM's own counters over a stretch of a test."""

    rounds: int = 0
    accepted: int = 0
    preemptions: int = 0
    prefix_hits: int = 0  # tokens

    @property
    def tau(self) -> float:
        return 1 + self.accepted / self.rounds


@contextmanager
def recorded(llm: LLM, look: Callable[[Any, Any], None]) -> Iterator[None]:
    """``look`` is given the stats that the engine hands to its loggers: the scheduler's and the iteration's, or None.

    Not what ``LLM.get_metrics`` reads: a new engine in the process takes the registry away from the ones before it.
    """
    manager = llm.llm_engine.logger_manager
    record = manager.record

    def look_and_record(scheduler_stats, iteration_stats, *args, **kwargs) -> None:
        look(scheduler_stats, iteration_stats)
        record(scheduler_stats, iteration_stats, *args, **kwargs)

    manager.record = look_and_record
    try:
        yield
    finally:
        manager.record = record


@contextmanager
def counted(llm: LLM) -> Iterator[Drafts]:
    """Counts verify rounds, accepted tokens, preemptions and prefix hits."""
    drafts = Drafts()

    def count(scheduler_stats, iteration_stats) -> None:
        if iteration_stats is not None:
            drafts.preemptions += iteration_stats.num_preempted_reqs
        if scheduler_stats and scheduler_stats.prefix_cache_stats:
            drafts.prefix_hits += scheduler_stats.prefix_cache_stats.hits
        stats = scheduler_stats and scheduler_stats.spec_decoding_stats
        if stats:
            drafts.rounds += stats.num_drafts
            drafts.accepted += stats.num_accepted_tokens

    with recorded(llm, count):
        yield drafts
    assert drafts.rounds > 0, "nothing was drafted"


def runner(llm: LLM):
    """The model runner of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
