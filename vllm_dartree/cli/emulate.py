"""Runs a command on a CPU, child processes included, with vLLM's GPU kernels in Triton's interpreter.

    vllm-dartree emulate -- vllm serve <target> --speculative-config '{"method": "dartree", "model": "<drafter>"}' \\
        --dtype float32 --max-model-len 512 --kv-cache-memory-bytes 67108864
    vllm-dartree emulate -- python my_script_that_uses_vllm.py

It needs the CPU build of vLLM, and is for demonstration and tests, never for speed.
"""

import argparse
import importlib.util
import os
import shutil
import sys

from vllm_dartree import emulation

SUMMARY = "run a vLLM command on a CPU, for demonstration and tests"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "vllm-dartree emulate -- COMMAND [ARGUMENT ...]"
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="COMMAND", help="the command and its arguments")


def require_cpu_build() -> None:
    """Refuses to emulate where vLLM is not there, or is not the build that can."""
    build = emulation.installed_build()
    if build is None:
        raise ValueError("vLLM is not installed here; install its CPU build with: pip install 'vllm-dartree[cpu]'")
    if build != "cpu":
        raise ValueError(
            "vLLM's build for GPUs is installed here, which cannot run on a CPU; on a machine with a GPU run the "
            "command as it is, and for the emulation install 'vllm-dartree[cpu]' into an environment of its own"
        )
    if importlib.util.find_spec("triton") is None:
        raise ValueError("Triton is not installed here, whose interpreter runs vLLM's kernels; pip install triton")


def run(args: argparse.Namespace) -> int:
    """Becomes the command; raises ValueError with a message for the person who typed it."""
    words = args.words[1:] if args.words[:1] == ["--"] else args.words
    if not words:
        raise ValueError("no command was given; put it behind '--', e.g. vllm-dartree emulate -- vllm serve MODEL")
    require_cpu_build()
    if words[0] == "vllm":
        words = [sys.executable, "-m", "vllm_dartree.emulation.vllm_command", *words[1:]]
    elif shutil.which(words[0]) is None:
        raise ValueError(f"there is no command '{words[0]}'")
    print(
        "vllm-dartree emulate: vLLM's kernels run in Triton's interpreter, for demonstration and tests, not for speed",
        file=sys.stderr,
        flush=True,
    )
    os.execvpe(words[0], words, os.environ | emulation.child_environment())
