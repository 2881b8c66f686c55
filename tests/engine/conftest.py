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

from vllm_dartree.assets import DOMINO, PROMPTS


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
            _drop_head(folder)
        (folder / "config.json").write_text(json.dumps(config))
        return str(folder)

    return make


def _drop_head(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    heads = {name for name in content["weight_map"] if name.startswith(("prefix_gru.", "embed_proj."))}
    for shard in {content["weight_map"][name] for name in heads}:
        (folder / shard).unlink()
    content["weight_map"] = {name: file for name, file in content["weight_map"].items() if name not in heads}
    index.write_text(json.dumps(content))
