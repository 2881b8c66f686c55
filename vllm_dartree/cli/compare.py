"""Runs every system of the comparison on one target/drafter pair, at batch size 1, and prints a table.

    vllm-dartree compare                                    # the bundled pair on its held-out prompts
    vllm-dartree compare --target Qwen/Qwen3-4B --draft <Domino checkpoint> --prompts gsm8k --out gsm8k.json

All systems share weights, prompts and the decoder that verifies; 'ar' (no speculation) always runs, for the speedup and
for the check that the tokens are identical.
"""

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from vllm_dartree.assets import DFLASH2, DOMINO, DSPARK, PROMPTS, TARGET
from vllm_dartree.hub import require_checkpoint
from vllm_dartree.reference.checkpoint import load_drafter, load_target
from vllm_dartree.reference.decoder import Generation, ReferenceDecoder, Summary
from vllm_dartree.reference.prompts import load_prompts
from vllm_dartree.reference.systems import SYSTEMS
from vllm_dartree.tree import TreeConfig, TreeConfigError

SUMMARY = "compare DARTree with chains and other trees on one pair"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Field of TreeConfig: option.
OPTIONS = {name: f"--{name.replace('_', '-')}" for name in ("budget", "width", "candidates", "depth_bonus")}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", default=str(TARGET), help="folder or hub name (default: the bundled target)")
    parser.add_argument("--draft", help="folder or hub name of a block drafter (default: the bundled Domino drafter)")
    parser.add_argument("--dspark-draft", help="for dspark and dartree_dspark (default with --draft: none)")
    parser.add_argument("--dflash2-draft", help="for dflash2 and dartree_dflash2 (default with --draft: none)")
    parser.add_argument("--prompts", default=str(PROMPTS), help="JSONL file or name of a data set, e.g. gsm8k")
    parser.add_argument("--methods", default="all", help=f"'all', or a comma-separated list of {', '.join(SYSTEMS)}")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    parser.add_argument("--seed", type=int, default=0, help="of the samples at a temperature above 0")
    parser.add_argument("--budget", type=int, default=64, help="B, verified nodes besides the anchor")
    parser.add_argument("--width", type=int, default=12, help="W, live branches per depth")
    parser.add_argument("--candidates", type=int, default=64, help="K, candidates per slot")
    parser.add_argument("--depth-bonus", type=float, default=-0.2, help="beta, at most 0")
    parser.add_argument("--max-samples", type=int, help="prompts to use (default: all, or a data set's usual number)")
    parser.add_argument("--max-new-tokens", type=int, default=192, help="per prompt")
    parser.add_argument("--dtype", choices=DTYPES, help="default: float32 on a CPU, bfloat16 on a GPU")
    parser.add_argument("--device", help="default: cuda if there is one, else cpu")
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="write PNG plots (needs matplotlib)")
    parser.add_argument("--sweep-budget", metavar="B,B,...", help="also run dartree with these budgets")
    parser.add_argument("--sweep-width", metavar="W,W,...", help="also run dartree with these widths")


def _integers(text: str | None, option: str) -> list[int]:
    try:
        values = [int(word) for word in (text or "").split(",") if word]
    except ValueError as error:
        raise ValueError(f"{option} is '{text}', but it must be integers with commas between them") from error
    return values


def _method_names(text: str) -> list[str]:
    """The methods that are asked for, ``ar`` first; 'all' is one of them."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names or not {"all", *SYSTEMS}.issuperset(names):
        raise ValueError(f"--methods is '{text}', but it must be 'all' or some of {', '.join(SYSTEMS)}")
    return list(dict.fromkeys(["ar", *names]))


def _runnable(names: list[str], heads: set[str]) -> list[str]:
    """The methods to run; 'all' leaves out what the drafters' heads cannot do, and says so."""
    if "all" not in names:
        return names
    left_out = [name for name, system in SYSTEMS.items() if system.needs not in {None, *heads}]
    if left_out:
        print(f"left out, since no drafter here has their head: {', '.join(left_out)}")
    return [name for name in SYSTEMS if name not in left_out]


def _row(method: str, temperature: float, summary: Summary, ar: Summary, identical: bool) -> dict[str, Any]:
    return {
        "method": method,
        "temperature": temperature,
        "tau": summary.tau,
        "tokens": summary.tokens,
        "rounds": summary.rounds,
        "accept_by_depth": summary.accept_by_depth,
        "hit_rate_on_spine": summary.hit_rates.on_spine,
        "hit_rate_after_sibling": summary.hit_rates.after_sibling,
        "seconds": summary.seconds,
        "tokens_per_second": summary.tokens_per_second,
        "speedup_vs_ar": summary.tokens_per_second / ar.tokens_per_second if ar.tokens_per_second else None,
        **{f"{stage}_ms": milliseconds for stage, milliseconds in summary.stage_ms.items()},
        "identical_to_ar": identical,
    }


def print_table(rows: list[dict[str, Any]]) -> None:
    """The rows of a result as a table on the terminal."""

    def number(format_spec: str) -> Callable[[Any], str]:
        return lambda value: "-" if value is None else format(value, format_spec)

    columns: list[tuple[str, str, Callable[[Any], str]]] = [
        ("method", "method", str),
        ("tau", "tau", number(".2f")),
        ("rounds", "rounds", str),
        ("tokens", "tokens", str),
        ("as ar", "identical_to_ar", lambda value: "yes" if value else "NO"),
        ("spine", "hit_rate_on_spine", number(".0%")),
        ("sibling", "hit_rate_after_sibling", number(".0%")),
        ("draft", "draft_ms", number(".1f")),
        ("tree", "tree_ms", number(".1f")),
        ("verify", "verify_ms", number(".1f")),
        ("commit", "commit_ms", number(".1f")),
        ("tok/s", "tokens_per_second", number(".0f")),
        ("x ar", "speedup_vs_ar", number(".2f")),
    ]
    table = Table(
        caption="tau: tokens per verify round; as ar: same tokens as without speculation; spine, sibling: how often "
        "the first choice for a slot is right after first choices, and after a sibling; draft to commit: ms per round"
    )
    for heading, key, _ in columns:
        table.add_column(heading, justify="left" if key == "method" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(show(row[key]) for _, key, show in columns))
    console = Console()
    # A log or a pipe has no width of its own, and a table cut to 80 columns would lose its last ones.
    Console(width=None if console.is_terminal else 130).print(table)


def check_out(path: Path | None) -> None:
    """Refuses an ``--out`` that could not be written hours later.

    Raises:
        ValueError: naming the path.
    """
    if path and (path.is_dir() or not path.parent.is_dir()):
        raise ValueError(f"--out is '{path}', but it must be a file in a folder that there is")


def _make_plot_folder(folder: Path) -> None:
    """Before the hours of work whose plots it is for."""
    if find_spec("matplotlib") is None:
        raise ValueError("--plot needs the package matplotlib: pip install 'vllm-dartree[bench]'")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--plot is '{folder}', which is no folder that can be made: {error.strerror}") from error


def _plot(folder: Path, rows: list[dict[str, Any]], sweeps: list[dict[str, Any]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    for key, label in (("tau", "tau (tokens per verify round)"), ("speedup_vs_ar", "speedup over ar")):
        figure, axes = pyplot.subplots(figsize=(8, 4))
        bars = axes.bar([row["method"] for row in rows], [row[key] or 0.0 for row in rows])
        axes.bar_label(bars, fmt="%.2f")
        axes.set_ylabel(label)
        axes.tick_params(axis="x", rotation=30)
        figure.tight_layout()
        figure.savefig(folder / f"{key}.png", dpi=120)
        pyplot.close(figure)
    for knob, symbol in (("budget", "B, verified nodes"), ("width", "W, branches per depth")):
        points = [(point[knob], point["tau"]) for point in sweeps if point["knob"] == knob]
        if points:
            figure, axes = pyplot.subplots(figsize=(6, 4))
            axes.plot(*zip(*sorted(points), strict=True), marker="o")
            axes.set_xlabel(symbol)
            axes.set_ylabel("tau of dartree")
            figure.tight_layout()
            figure.savefig(folder / f"tau_by_{knob}.png", dpi=120)
            pyplot.close(figure)
    print(f"plots: {folder}")


def run(args: argparse.Namespace) -> int:
    """Runs the comparison; raises ValueError with a message for the person who typed the command."""
    try:
        return _run(args)
    except TreeConfigError as error:
        raise ValueError(error.in_words_of(OPTIONS)) from error


def _run(args: argparse.Namespace) -> int:
    config = TreeConfig(args.budget, args.width, args.candidates, args.depth_bonus)
    if not (math.isfinite(args.temperature) and args.temperature >= 0):
        raise ValueError(f"--temperature is {args.temperature}, but it must be a finite number >= 0")
    for option in ("max_samples", "max_new_tokens"):
        value = getattr(args, option)
        if value is not None and value < 1:
            raise ValueError(f"--{option.replace('_', '-')} is {value}, but it must be an integer >= 1")
    sweeps = [("budget", value) for value in _integers(args.sweep_budget, "--sweep-budget")]
    sweeps += [("width", value) for value in _integers(args.sweep_width, "--sweep-width")]
    swept = [(knob, replace(config, **{knob: value})) for knob, value in sweeps]

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.zeros((), device=device).item()
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"--device is '{device}', which this torch cannot use: {str(error).splitlines()[0]}"
        ) from error
    dtype = DTYPES[args.dtype] if args.dtype else (torch.float32 if device == "cpu" else torch.bfloat16)
    asked = _method_names(args.methods)
    check_out(args.out)
    if args.plot:
        _make_plot_folder(args.plot)
    bundled = args.draft is None
    draft = str(DOMINO) if bundled else args.draft
    for option, path in (("--target", args.target), ("--draft", draft)):
        require_checkpoint(option, path)
    target = load_target(args.target, dtype=dtype, device=device)
    vocabulary = target.embedding.num_embeddings
    if config.candidates > vocabulary:
        raise ValueError(
            f"--candidates is {config.candidates}, but the target's vocabulary has {vocabulary} tokens; it must be at "
            "most that"
        )
    drafter = load_drafter(draft, target)
    others = {
        "markov": args.dspark_draft or (str(DSPARK) if bundled else None),
        "selector": args.dflash2_draft or (str(DFLASH2) if bundled else None),
    }
    names = _runnable(asked, {drafter.spec.head} | {head for head, path in others.items() if path})
    needed = {SYSTEMS[name].needs for name in names}
    # By the head that a method needs; all others draft with --draft.
    drafters = {head: load_drafter(path, target) for head, path in others.items() if path and head in needed}

    def decoder_of(name: str, knobs: TreeConfig) -> ReferenceDecoder:
        chosen = None if name == "ar" else drafters.get(SYSTEMS[name].needs, drafter)
        return ReferenceDecoder(target, chosen, name, knobs, temperature=args.temperature, seed=args.seed)

    for name in names:
        decoder_of(name, config)  # refuses what cannot work before the first of them has decoded everything
    prompts = load_prompts(args.prompts, target.tokenizer, args.max_samples)

    def decode(name: str, knobs: TreeConfig, label: str) -> list[Generation]:
        decoder = decoder_of(name, knobs)
        decoder.generate(prompts[0], min(32, args.max_new_tokens))  # warm-up
        return [decoder.generate(prompt, args.max_new_tokens) for prompt in tqdm(prompts, desc=label, unit="prompt")]

    rows: list[dict[str, Any]] = []
    for name in names:
        generations = decode(name, config, name)
        tokens, summary = [generation.tokens for generation in generations], Summary.of(generations)
        if name == "ar":
            expected, ar = tokens, summary
        rows.append(_row(name, args.temperature, summary, ar, tokens == expected))
    points = []
    for knob, knobs in swept:
        generations = decode("dartree", knobs, f"dartree {knob}={getattr(knobs, knob)}")
        points.append(
            {
                "knob": knob,
                "budget": knobs.budget,
                "width": knobs.width,
                "tau": Summary.of(generations).tau,
                "identical_to_ar": [generation.tokens for generation in generations] == expected,
            }
        )
    print_table(rows)
    for point in points:
        identical = "identical" if point["identical_to_ar"] else "NOT identical"
        print(f"dartree B={point['budget']} W={point['width']}: tau {point['tau']:.2f}, {identical} to ar")
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    settings = {key: value for key, value in settings.items() if key not in ("run", "command")}
    settings |= {"device": device, "dtype": str(dtype).removeprefix("torch."), "num_prompts": len(prompts)}
    if args.out:
        args.out.write_text(json.dumps({"config": settings, "rows": rows, "sweeps": points}, indent=2) + "\n")
        print(f"results: {args.out}")
    if args.plot:
        _plot(args.plot, rows, points)
    return 0
