"""Times vLLM without speculation, with its own chains, and with dartree, on the same prompts and outputs.

    python scripts/bench_vllm.py --target Qwen/Qwen3-8B --draft <Domino checkpoint> \\
        --dflash-draft <DFlash checkpoint> --data-sets gsm8k,humaneval --out bench.json      # on a GPU
    python scripts/bench_vllm.py --max-samples 4 --max-new-tokens 16                         # here: the bundled pair

Each method is an engine in a process of its own, which serves all loads one after the other: so many requests at once,
a new one for each that ends, after a warm-up of each number. Speed on a CPU is the interpreter's and means nothing; tau
and the number of steps do. Exits with 1 if tokens differ from those without speculation in float32 where they must not:
greedily with any method, seeded with dartree (vLLM's own chains keep the distribution and not the tokens of a seed).
"""

import argparse
import itertools
import json
import multiprocessing
import os
import platform
import shutil
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_dartree import emulation
from vllm_dartree.assets import DOMINO, DSPARK, PROMPTS, TARGET
from vllm_dartree.cli.compare import check_out
from vllm_dartree.cli.demo import counters
from vllm_dartree.heads import DrafterSpec
from vllm_dartree.heads.domino import DominoSpec
from vllm_dartree.hub import require_checkpoint

# In the order of the table. Those of vLLM's own need a drafter of their own kind.
METHODS = ("none", "dflash", "dspark", "chain", "dartree", "auto")


@dataclass(frozen=True)
class Load:
    """One cell of the benchmark: what is asked, how, and how many at once."""

    data_set: str
    temperature: float
    concurrency: int


@dataclass
class Served:
    """What a client saw of one request; times in seconds since the load began."""

    tokens: list[int]
    asked: float
    chunks: list[float]  # when each output came

    @property
    def time_to_first_token(self) -> float:
        return self.chunks[0] - self.asked

    @property
    def time_per_token(self) -> float:
        """After the first one, as vLLM's own benchmark counts it (TPOT)."""
        return (self.chunks[-1] - self.chunks[0]) / max(len(self.tokens) - 1, 1)


def speculative_configs(args: argparse.Namespace, dflash: str | None, dspark: str | None) -> dict[str, Any]:
    """``speculative_config`` by method; those whose drafter is missing are left out."""
    tree = {"method": "dartree", "model": args.draft, "num_speculative_tokens": args.budget}
    configs: dict[str, Any] = {"none": None}
    for name, drafter in (("dflash", dflash), ("dspark", dspark)):
        if drafter is not None:
            configs[name] = {"method": name, "model": drafter, "num_speculative_tokens": args.chain_tokens}
    configs["chain"] = {"method": "dartree", "model": args.draft, "tree_variant": "chain"}
    configs["dartree"] = tree | {"tree_width": args.width}
    configs["auto"] = configs["dartree"] | {"tree_budget": "auto"}
    chosen = args.methods.split(",")
    for name in chosen:
        if name not in METHODS:
            raise ValueError(f"--methods has '{name}', but it must be some of {', '.join(METHODS)}")
        if name not in configs:
            raise ValueError(f"--methods has '{name}', which needs --{name}-draft")
    return {name: configs[name] for name in METHODS if name in chosen}


def without_head(drafter: Path, folder: Path) -> str:
    """A plain DFlash checkpoint out of a Domino one on disk: the same backbone, without the head's tensors."""
    shutil.copytree(drafter, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config["dflash_config"]["projector_type"] = None
    (folder / "config.json").write_text(json.dumps(config))
    drop_head(folder)
    return str(folder)


def has_removable_head(folder: Path) -> bool:
    """Whether a checkpoint is a Domino drafter in shards, of which ``drop_head`` can make a plain one."""
    if not (folder / "model.safetensors.index.json").is_file():
        return False
    return DrafterSpec.from_config(json.loads((folder / "config.json").read_text())).head == DominoSpec.head


def drop_head(folder: Path) -> None:
    """Takes a Domino head's tensors, which have shards of their own, out of a checkpoint."""
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    of_head = DominoSpec.tensor_prefixes
    kept = {name: shard for name, shard in content["weight_map"].items() if not name.startswith(of_head)}
    for shard in set(content["weight_map"].values()).difference(kept.values()):
        (folder / shard).unlink()
    index.write_text(json.dumps(content | {"weight_map": kept}))


def serve(llm: Any, prompts: list[list[int]], params: list[Any], concurrency: int) -> tuple[list[Served], float, int]:
    """Serves all prompts, ``concurrency`` at once; also the seconds and the engine steps that it took."""
    core = llm.llm_engine
    waiting = list(enumerate(zip(prompts, params, strict=True)))[::-1]
    served: dict[str, Served] = {}
    start, steps = time.perf_counter(), 0
    while waiting or core.has_unfinished_requests():
        while waiting and core.get_num_unfinished_requests() < concurrency:
            number, (prompt, param) = waiting.pop()
            served[str(number)] = Served([], time.perf_counter() - start, [])
            core.add_request(str(number), {"prompt_token_ids": prompt}, param)
        outputs = core.step()
        steps += 1
        now = time.perf_counter() - start
        for output in outputs:
            one = served[output.request_id]
            one.tokens = list(output.outputs[0].token_ids)
            one.chunks.append(now)
    seconds = time.perf_counter() - start
    return [served[str(number)] for number in range(len(prompts))], seconds, steps


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]


def run_method(job: dict[str, Any]) -> list[dict[str, Any]]:
    """All loads with one method; a row for each. Runs in a process of its own."""
    from vllm import LLM, SamplingParams

    from vllm_dartree.reference.prompts import load_prompts

    llm = LLM(**job["engine"], speculative_config=job["speculative_config"])
    dtype = str(llm.llm_engine.vllm_config.model_config.dtype).removeprefix("torch.")
    warm: set[int] = set()
    rows = []
    for load in job["loads"]:
        prompts = load_prompts(load.data_set, llm.get_tokenizer(), job["max_samples"])
        params = [
            SamplingParams(temperature=load.temperature, max_tokens=job["max_new_tokens"], seed=seed)
            for seed in range(len(prompts))
        ]
        if load.concurrency not in warm and not emulation.is_active():
            serve(llm, prompts, params, load.concurrency)
            warm.add(load.concurrency)
        before = counters(llm)
        served, seconds, steps = serve(llm, prompts, params, load.concurrency)
        rounds, accepted = (after - early for after, early in zip(counters(llm), before, strict=True))
        first = [one.time_to_first_token for one in served]
        each = [one.time_per_token for one in served]
        gaps = [late - early for one in served for early, late in itertools.pairwise(one.chunks)]
        num_tokens = sum(len(one.tokens) for one in served)
        rows.append(
            {
                "method": job["method"],
                "data_set": load.data_set,
                "temperature": load.temperature,
                "concurrency": load.concurrency,
                "requests": len(served),
                "tokens": num_tokens,
                "steps": steps,
                "tau": 1 + accepted / rounds if rounds else 1.0,
                "seconds": seconds,
                "tokens_per_second": num_tokens / seconds,
                **{
                    f"{name}_{label}_ms": 1000 * percentile(values, share)
                    for name, values in (("ttft", first), ("tpot", each), ("itl", gaps or [0.0]))
                    for label, share in (("p50", 0.5), ("p99", 0.99))
                },
                "dtype": dtype,
                "token_ids": [one.tokens for one in served],
            }
        )
    return rows


def compare(rows: list[dict[str, Any]]) -> None:
    """Adds to each row its speed and the share of identical outputs, against no speculation under the same load."""
    plain = {cell(row): row for row in rows if row["method"] == "none"}
    for row in rows:
        other = plain.get(cell(row))
        if other is not None:
            row["speedup"] = row["tokens_per_second"] / other["tokens_per_second"]
            same = [ours == theirs for ours, theirs in zip(row["token_ids"], other["token_ids"], strict=True)]
            row["identical"] = sum(same) / len(same)
    for row in rows:
        del row["token_ids"]


def cell(row: dict[str, Any]) -> tuple:
    return row["data_set"], row["temperature"], row["concurrency"]


def print_table(rows: list[dict[str, Any]], timed: bool) -> None:
    """Markdown, loads in the order they were asked for; without times where these mean nothing."""
    times = ["tok/s", "speedup", "TTFT p50 / p99, ms", "TPOT p50 / p99, ms", "ITL p99, ms"] if timed else []
    heads = ["data set", "T", "at once", "method", "tau", "steps", *times, "outputs as without"]
    print("| " + " | ".join(heads) + " |")
    print("|" + "---|" * len(heads))
    for row in sorted(rows, key=lambda row: (cell(row), METHODS.index(row["method"]))):
        cells = [Path(row["data_set"]).stem, f"{row['temperature']:g}", row["concurrency"], row["method"]]
        cells += [f"{row['tau']:.2f}", row["steps"]]
        if timed:
            cells += [f"{row['tokens_per_second']:.0f}", f"{row['speedup']:.2f}x" if "speedup" in row else "-"]
            cells += [f"{row[f'{name}_p50_ms']:.1f} / {row[f'{name}_p99_ms']:.1f}" for name in ("ttft", "tpot")]
            cells += [f"{row['itl_p99_ms']:.1f}"]
        cells += [f"{row['identical']:.0%}" if "identical" in row else "-"]
        print("| " + " | ".join(map(str, cells)) + " |")


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=str(TARGET), help="folder or hub name (default: the bundled target)")
    parser.add_argument(
        "--draft", default=str(DOMINO), help="drafter for dartree (default: the bundled Domino drafter)"
    )
    parser.add_argument("--dflash-draft", help="plain DFlash drafter (default for a folder: --draft without its head)")
    parser.add_argument("--dspark-draft", help="DSpark drafter (default: the bundled one, with the bundled target)")
    parser.add_argument("--methods", help=f"some of {','.join(METHODS)} (default: all that have a drafter)")
    parser.add_argument("--data-sets", default=str(PROMPTS), help="names as in 'vllm-dartree compare', or JSONL files")
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--concurrency", default="1,8,32", help="how many requests at once")
    parser.add_argument("--max-samples", type=int, help="of each data set (default: its usual number)")
    parser.add_argument("--max-new-tokens", type=int, default=1024)
    parser.add_argument("--budget", type=int, default=64, help="B, verified nodes besides the anchor")
    parser.add_argument("--width", type=int, default=12, help="W, live branches per depth")
    parser.add_argument("--chain-tokens", type=int, default=15, help="draft tokens of vLLM's own chains")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write all figures as JSON")
    return parser.parse_args(words)


def numbers(option: str, text: str, kind: type, minimum: float) -> list:
    """The values of a comma-separated option."""
    try:
        values = [kind(word) for word in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < minimum:
        raise ValueError(f"{option} is '{text}', but it must be numbers >= {minimum} with commas between them")
    return values


def main(words: list[str] | None = None) -> int:
    try:
        return run(parse(words))
    except ValueError as error:
        print(f"bench_vllm.py: error: {error}", file=sys.stderr)
        return 2


def run(args: argparse.Namespace) -> int:
    for option in ("target", "draft", "dflash_draft", "dspark_draft"):
        if getattr(args, option):
            require_checkpoint(f"--{option.replace('_', '-')}", getattr(args, option))
    check_out(args.out)
    on_cpu = emulation.installed_build() == "cpu"
    loads = [
        Load(data_set, temperature, concurrency)
        for data_set in args.data_sets.split(",")
        for temperature in numbers("--temperatures", args.temperatures, float, 0)
        for concurrency in numbers("--concurrency", args.concurrency, int, 1)
    ]
    engine: dict[str, Any] = {
        "model": args.target,
        "max_model_len": args.max_model_len,
        "max_num_seqs": max(load.concurrency for load in loads),
        "tensor_parallel_size": args.tensor_parallel_size,
        "disable_log_stats": False,
        "enable_prefix_caching": False,  # all loads of a data set have the same prompts
    }
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if on_cpu:
        os.environ |= emulation.child_environment() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        engine |= {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 512 << 20}
        engine |= {"max_model_len": min(args.max_model_len, 512), "max_num_batched_tokens": 4096}
    with tempfile.TemporaryDirectory() as folder:
        dflash = args.dflash_draft
        is_wanted = not args.methods or "dflash" in args.methods.split(",")
        if dflash is None and is_wanted and has_removable_head(Path(args.draft)):
            dflash = without_head(Path(args.draft), Path(folder) / "dflash")
        dspark = args.dspark_draft or (str(DSPARK) if args.target == str(TARGET) else None)
        known = [name for name in METHODS if {"dflash": dflash, "dspark": dspark}.get(name, True)]
        args.methods = args.methods or ",".join(known)
        rows = []
        for method, speculative_config in speculative_configs(args, dflash, dspark).items():
            print(f"running {method} ...", file=sys.stderr, flush=True)
            job = {
                "method": method,
                "engine": engine,
                "speculative_config": speculative_config,
                "loads": loads,
                "max_samples": args.max_samples,
                "max_new_tokens": args.max_new_tokens,
            }
            # One at a time, since speed is measured; a process serves one engine only.
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
                rows += pool.submit(run_method, job).result()
    compare(rows)
    if on_cpu:
        print("Emulated on a CPU: speed means nothing here and is left out of the table.\n")
    print_table(rows, timed=not on_cpu)
    if args.out:
        args.out.write_text(json.dumps({"machine": platform.platform(), "emulated": on_cpu, "rows": rows}, indent=1))
    return 0 if all(row["identical"] == 1 for row in rows if must_be_identical(row)) else 1


def must_be_identical(row: dict[str, Any]) -> bool:
    is_exact = row["temperature"] == 0 or row["method"] in ("chain", "dartree", "auto")
    return row["dtype"] == "float32" and "identical" in row and is_exact


if __name__ == "__main__":
    sys.exit(main())
