"""The training script trains a miniature that the reference decoder can use, and goes on where it was stopped."""

import argparse
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from train_tiny_pair import Training

from vllm_dartree.assets import ASSETS
from vllm_dartree.reference.checkpoint import load_drafter, load_target
from vllm_dartree.reference.decoder import ReferenceDecoder
from vllm_dartree.reference.prompts import load_prompts

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "train_tiny_pair.py"


@pytest.mark.slow
def test_a_miniature_trains_loads_and_decodes(tmp_path):
    command = [sys.executable, str(SCRIPT), "--steps", "2", "--files", "120", "--prompts", "4"]
    subprocess.run([*command, "--out", str(tmp_path), "--work-dir", str(tmp_path / "work")], check=True)
    target = load_target(str(tmp_path / "tiny-target"), dtype=torch.float32, device="cpu")
    prompts = load_prompts(str(tmp_path / "prompts.jsonl"), target.tokenizer)
    assert len(prompts) == 4
    expected = ReferenceDecoder(target, None, "ar").generate(prompts[0], 12).tokens
    for name in ("tiny-domino", "tiny-dspark", "tiny-dflash2"):
        decoder = ReferenceDecoder(target, load_drafter(str(tmp_path / name), target), "dartree")
        assert decoder.generate(prompts[0], 12).tokens == expected


def _training(folder: Path) -> tuple[nn.Module, Training]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    args = argparse.Namespace(work_dir=folder, seed=3, save_every=2)
    return module, Training("toy", module, [module[0].weight], args, steps=6)


def _losses(module: nn.Module, stop_at: int | None = None):
    calls = 0

    def losses(generator: torch.Generator) -> dict[str, torch.Tensor]:
        nonlocal calls
        calls += 1
        if calls == stop_at:
            raise KeyboardInterrupt
        inputs = torch.randn(8, 4, generator=generator)
        return {"square": (module(inputs) - inputs.sum(-1, keepdim=True)).square().mean()}

    return losses


def test_a_resumed_training_equals_an_uninterrupted_one(tmp_path):
    for name in ("whole", "halves"):
        (tmp_path / name).mkdir()
    whole, training = _training(tmp_path / "whole")
    training.run(_losses(whole))
    stopped, training = _training(tmp_path / "halves")
    with pytest.raises(KeyboardInterrupt):
        training.run(_losses(stopped, stop_at=4))
    resumed, training = _training(tmp_path / "halves")
    training.run(_losses(resumed))
    for expected, actual in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(expected, actual)


def test_the_bundled_pair_fits_in_twelve_megabytes():
    files = [path for path in ASSETS.rglob("*") if path.is_file() and not path.is_symlink()]
    assert sum(path.stat().st_size for path in files) < 12_000_000
