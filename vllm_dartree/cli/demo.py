"""Generates with vLLM as it is and with method 'dartree', compares, and draws one round's tree.

    vllm-dartree demo                                                       # the bundled pair; about a minute on a CPU
    vllm-dartree demo --target Qwen/Qwen3-8B --draft <Domino checkpoint>    # on a GPU, with tokens per second

Each engine runs in a process of its own. On a CPU they are emulated, so that their speed means nothing there.
"""

import argparse
import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.tree import Tree

from vllm_dartree import emulation
from vllm_dartree.assets import DOMINO, PROMPTS, TARGET
from vllm_dartree.hub import require_checkpoint

SUMMARY = "generate with and without dartree, compare, and draw a tree"
# For a target of the user's own; the bundled one speaks Python only, and has its own prompts.
QUESTIONS = (
    "A train leaves at 9:40 and arrives at 13:05. How long does the journey take? Explain step by step.",
    "Write a Python function that returns the n-th Fibonacci number, with a docstring and type hints.",
    "Explain in a few sentences why the sky is blue.",
    "Natalia sold 48 clips in April and half as many in May. How many did she sell altogether?",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", help="folder or hub name (default: the bundled target)")
    parser.add_argument("--draft", help="folder or hub name of a drafter for the target")
    parser.add_argument(
        "--budget", type=int, help="B, verified nodes besides the anchor (default: 16 on a CPU, else 64)"
    )
    parser.add_argument("--width", type=int, help="W, live branches per depth (default: 4 on a CPU, else 12)")
    parser.add_argument("--num-prompts", type=int, default=3, help="how many of the prompts to run (default: 3)")
    parser.add_argument("--max-new-tokens", type=int, help="per prompt (default: 48 on a CPU, else 256)")


@dataclass
class Job:
    """What one engine is to do; it travels to a process of its own."""

    engine: dict[str, Any]
    prompts: list[Any]  # {"prompt_token_ids": [...]}, or a question for the target's chat template
    max_new_tokens: int
    draw: bool = False  # whether to record the rounds of the first prompt


@dataclass
class Round:
    """One verify round of one request, as the engine ran it."""

    tokens: list[str]  # of the rows; row 0 is the anchor
    parents: list[int]
    path: list[int]  # accepted rows, the anchor's first


@dataclass
class Report:
    """What one engine did."""

    prompts: list[str]  # as the model saw them
    texts: list[str]
    tokens: list[list[int]]
    seconds: float
    dtype: str
    drafts: int = 0
    accepted: int = 0
    rounds: list[Round] = field(default_factory=list)


def _generate(job: Job) -> Report:
    """Runs in a process of its own, since an engine does not give all of its memory back."""
    import time

    from vllm import LLM, SamplingParams

    llm = LLM(**job.engine)
    params = SamplingParams(temperature=0, max_tokens=job.max_new_tokens)

    def generate(prompts: list[Any]) -> list:
        if all(isinstance(prompt, str) for prompt in prompts) and llm.get_tokenizer().chat_template:
            return llm.chat([[{"role": "user", "content": prompt}] for prompt in prompts], params, use_tqdm=False)
        return llm.generate(prompts, params, use_tqdm=False)

    if not emulation.is_active():
        generate(job.prompts)  # a first run compiles and captures what a second one only uses
    before = counters(llm)
    start = time.perf_counter()
    outputs = generate(job.prompts)
    seconds = time.perf_counter() - start
    after = counters(llm)
    tokenizer = llm.get_tokenizer()
    report = Report(
        prompts=[tokenizer.decode(output.prompt_token_ids) for output in outputs],
        texts=[output.outputs[0].text for output in outputs],
        tokens=[list(output.outputs[0].token_ids) for output in outputs],
        seconds=seconds,
        dtype=str(llm.llm_engine.vllm_config.model_config.dtype).removeprefix("torch."),
        drafts=after[0] - before[0],
        accepted=after[1] - before[1],
    )
    if job.draw:
        report.rounds = _recorded_rounds(llm, lambda: generate(job.prompts[:1]))
    return report


def counters(llm: Any) -> tuple[int, int]:
    """Verify rounds and accepted draft tokens so far, of all requests."""
    values = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    rounds, accepted = "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens"
    return values.get(rounds, 0), values.get(accepted, 0)


def _recorded_rounds(llm: Any, generate: Any) -> list[Round]:
    """The rounds of a request, read off the engine where it is about to propose, with the step's trees still there."""
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    speculator, tokenizer = runner.speculator, llm.get_tokenizer()
    native, rounds = speculator.propose, []

    def propose(input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        step = speculator.trees.step
        if step is not None and step.accepted is not None:
            path = [row for row in step.accepted.path[0].tolist() if row >= 0]
            ids = input_batch.input_ids[step.tokens].tolist()
            rounds.append(Round([tokenizer.decode([i]) for i in ids], step.parents[0].tolist()[: len(ids)], path))
        return native(input_batch, *args, **kwargs)

    speculator.propose = propose
    try:
        generate()
    finally:
        del speculator.propose
    return rounds


def draw(done: Round) -> Tree:
    """The tree of a round for the terminal, its accepted path marked."""

    def label(row: int) -> str:
        text = escape(done.tokens[row].replace("\n", "\\n").replace(" ", "\u00b7") or "\u2205")
        return f"[bold green]{text} \u2713[/]" if row in done.path else text

    root = Tree(label(0))
    branches = {0: root}
    # A parent's row is above its children's, and -1 marks a node that no token was found for.
    for row, parent in enumerate(done.parents):
        if row and parent >= 0:
            branches[row] = branches[parent].add(label(row))
    return root


def _best_to_look_at(rounds: list[Round]) -> Round:
    """The round that got furthest; among those one that left the first branch, which no chain could have followed."""

    def branched(done: Round) -> int:
        return sum(row > done.parents.index(done.parents[row], 1) for row in done.path[1:])

    return max(rounds, key=lambda done: (len(done.path), branched(done)))


def _jobs(args: argparse.Namespace, on_cpu: bool) -> tuple[Job, Job]:
    """Without dartree, and with."""
    budget, width = args.budget or (16 if on_cpu else 64), args.width or (4 if on_cpu else 12)
    max_new_tokens = args.max_new_tokens or (48 if on_cpu else 256)
    target, draft = args.target or str(TARGET), args.draft or str(DOMINO)
    engine: dict[str, Any] = {"model": target, "disable_log_stats": False, "max_model_len": 2048, "max_num_seqs": 4}
    prompts: list[Any] = list(QUESTIONS)
    if args.target is None:
        lines = PROMPTS.read_text().splitlines()
        prompts = [{"prompt_token_ids": json.loads(line)["prompt_token_ids"]} for line in lines]
        engine |= {"dtype": "float32", "max_model_len": 512}
    if on_cpu:
        engine |= {"enforce_eager": True, "kv_cache_memory_bytes": 256 << 20, "max_num_batched_tokens": 1024}
        engine |= {"use_tqdm_on_load": False}
    prompts = prompts[: args.num_prompts]
    tree = {
        "method": "dartree",
        "model": draft,
        "num_speculative_tokens": budget,
        "tree_width": width,
    }
    return (
        Job(engine, prompts, max_new_tokens),
        Job(engine | {"speculative_config": tree}, prompts, max_new_tokens, draw=True),
    )


def _run(jobs: tuple[Job, ...], on_cpu: bool) -> list[Report]:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TOKENIZERS_PARALLELISM": "false"}
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if on_cpu:
        os.environ |= emulation.child_environment()
    # One at a time where speed is measured; a process serves one engine only.
    with ProcessPoolExecutor(
        len(jobs) if on_cpu else 1, mp_context=multiprocessing.get_context("spawn"), max_tasks_per_child=1
    ) as pool:
        return list(pool.map(_generate, jobs))


def _tail(text: str, lines: int) -> str:
    return "\n".join(text.splitlines()[-lines:])


def run(args: argparse.Namespace) -> int:
    """Prints what both engines did; raises ValueError with a message for the person who typed the command."""
    for option in ("budget", "width", "num_prompts", "max_new_tokens"):
        value = getattr(args, option)
        if value is not None and value < 1:
            raise ValueError(f"--{option.replace('_', '-')} is {value}, but it must be an integer >= 1")
    if (args.target is None) != (args.draft is None):
        raise ValueError("--target and --draft belong together: give both, or neither for the bundled pair")
    for option in ("target", "draft"):
        if getattr(args, option) is not None:
            require_checkpoint(f"--{option}", getattr(args, option))
    build = emulation.installed_build()
    if build is None:
        raise ValueError("vLLM is not installed here: pip install 'vllm-dartree[cuda]', or [cpu] without a GPU")
    on_cpu = build == "cpu"
    console = Console(highlight=False)
    console.print(
        "Starting vLLM twice, with method 'dartree' and without"
        + (", emulated on this CPU: for demonstration, not for speed." if on_cpu else ".")
    )
    plain, tree = _run(_jobs(args, on_cpu), on_cpu)
    for number, (prompt, text) in enumerate(zip(tree.prompts, tree.texts, strict=True)):
        console.rule(f"prompt {number + 1}")
        console.print(escape(_tail(prompt, 6)), style="dim", end="")
        console.print(escape(text), style="bold")
    console.rule("one round")
    if tree.rounds:
        done = _best_to_look_at(tree.rounds)
        console.print(draw(done))
        console.print(
            f"One forward of the target verified {len(done.tokens) - 1} nodes; {len(done.path) - 1} of them (\u2713) "
            "are what it would have written itself, and it adds a token of its own."
        )
    console.rule("result")
    same = [a == b for a, b in zip(plain.tokens, tree.tokens, strict=True)]
    steps = sum(len(tokens) - 1 for tokens in plain.tokens)  # the prefill gives each request's first token
    tau = 1 + tree.accepted / max(tree.drafts, 1)
    exact = plain.dtype == "float32"
    console.print(
        f"tokens       {'identical' if all(same) else 'NOT identical'} to vLLM without speculation on {sum(same)} of "
        f"{len(same)} prompts"
        + ("" if exact or all(same) else f"; in {plain.dtype} near-ties may fall either way, with any method")
    )
    console.print(f"tau          {tau:.2f} tokens per verify round")
    console.print(f"rounds       {tree.drafts} verify rounds instead of {steps} decode steps")
    if not on_cpu:
        rates = [sum(map(len, report.tokens)) / report.seconds for report in (plain, tree)]
        console.print(f"tokens/s     {rates[1]:.0f} against {rates[0]:.0f} without: {rates[1] / rates[0]:.2f}x")
    return 0 if all(same) or not exact else 1
