"""vLLM's V2 engine in this process, its kernels in Triton's interpreter; engines are started once and shared."""

import os

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from vllm_dartree.emulation import activate

activate()

import json
import shutil
from pathlib import Path

import pytest
import torch
from bench_vllm import drop_head
from safetensors.torch import load_file, save_file

from vllm_dartree.assets import DOMINO, PROMPTS, TARGET


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """Token ids of the bundled prompts, of different lengths."""
    return [json.loads(line)["prompt_token_ids"] for line in PROMPTS.read_text().splitlines()]


@pytest.fixture(scope="session")
def drafter_with(tmp_path_factory):
    """A copy of the bundled Domino drafter with changes of its config; ``projector_type=None`` drops the head."""

    def make(**changes: object) -> str:
        folder = shutil.copytree(DOMINO, tmp_path_factory.mktemp("drafter") / "copy")
        config = json.loads((folder / "config.json").read_text())
        for key, value in changes.items():
            place = config if key in config else config["dflash_config"]
            place[key] = value
        if changes.get("projector_type", "domino") is None:
            drop_head(folder)
        (folder / "config.json").write_text(json.dumps(config))
        return str(folder)

    return make


@pytest.fixture(scope="session")
def padded_pair(tmp_path_factory) -> tuple[str, str]:
    """Target and drafter with five tokens more, which no text has: 1029 is no multiple of 32, nor of any block."""
    return tuple(_with_more_tokens(folder, tmp_path_factory.mktemp("padded") / "copy") for folder in (TARGET, DOMINO))


@pytest.fixture(scope="session")
def crowded_engines(padded_pair):
    """``engines.crowded`` on the padded pair."""
    from engine.engines import crowded

    return crowded(*padded_pair)


def _with_more_tokens(folder: Path, copy: Path, more: int = 5) -> str:
    shutil.copytree(folder, copy)
    config = json.loads((copy / "config.json").read_text())
    size, config["vocab_size"] = config["vocab_size"], config["vocab_size"] + more
    (copy / "config.json").write_text(json.dumps(config))
    for shard in copy.glob("*.safetensors"):
        weights = load_file(shard)
        for name, weight in weights.items():
            if weight.shape[0] == size:
                weights[name] = torch.cat([weight, torch.zeros(more, *weight.shape[1:], dtype=weight.dtype)])
        save_file(weights, shard, metadata={"format": "pt"})
    return str(copy)


@pytest.fixture
def steps(monkeypatch) -> list:
    """All steps with drafts of a test, ``TreeStep`` each."""
    from vllm_dartree.engine.state import TreeState

    seen, native = [], TreeState.begin_step

    def watched(*args: object) -> object:
        seen.append(native(*args))
        return seen[-1]

    monkeypatch.setattr(TreeState, "begin_step", watched)
    return seen
