"""Drafters that cannot work are refused with what is wrong with them."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_dartree.assets import DOMINO
from vllm_dartree.heads import DrafterConfigError
from vllm_dartree.reference.checkpoint import CheckpointError, load_drafter, load_target

HEAD_SHARD = "model-00002-of-00002.safetensors"


@pytest.fixture
def copy(tmp_path):
    """A copy of the bundled Domino drafter that a test may spoil."""
    return shutil.copytree(DOMINO, tmp_path / "drafter")


def _change_config(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    nested = changes.pop("dflash_config", {})
    config["dflash_config"] |= nested
    path.write_text(json.dumps(config | changes))


def _change_tensors(folder, change):
    tensors = load_file(folder / HEAD_SHARD)
    change(tensors)
    save_file(tensors, folder / HEAD_SHARD)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": 96}, "hidden_size is 96 but the target's is 192"),
        ({"vocab_size": 1000}, "vocab_size is 1000 but the target's is 1024"),
        ({"dflash_config": {"target_layer_ids": [1, 5]}}, "ids go from 0 to 4"),
        ({"dflash_config": {"mask_token_id": 1024}}, "mask_token_id is 1024"),
        ({"block_size": None}, "no 'block_size'"),
    ],
)
def test_a_config_that_does_not_fit_the_target_is_refused(target, copy, changes, words):
    _change_config(copy, **changes)
    with pytest.raises(DrafterConfigError, match=words):
        load_drafter(str(copy), target)


def test_tensor_faults_are_named(target, copy):
    _change_tensors(copy, lambda tensors: tensors.pop("prefix_gru.weight_hh_l0"))
    with pytest.raises(CheckpointError, match=r"missing 'prefix_gru\.weight_hh_l0'"):
        load_drafter(str(copy), target)
    _change_tensors(copy, lambda tensors: tensors.update({"prefix_gru.weight_hh_l0": torch.zeros(3, 3)}))
    with pytest.raises(CheckpointError, match=r"'prefix_gru\.weight_hh_l0' has shape \[3, 3\] instead of \[384, 128\]"):
        load_drafter(str(copy), target)
    _change_tensors(
        copy, lambda tensors: tensors.update({"prefix_gru.weight_hh_l0": torch.full((384, 128), torch.nan)})
    )
    with pytest.raises(CheckpointError, match=r"'prefix_gru\.weight_hh_l0' has NaNs"):
        load_drafter(str(copy), target)
    _change_tensors(copy, lambda tensors: tensors.update(extra=torch.zeros(1)))
    with pytest.raises(CheckpointError, match="surplus 'extra'"):
        load_drafter(str(copy), target)


def test_truncated_files_are_named(target, copy):
    shard = copy / HEAD_SHARD
    shard.write_bytes(shard.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=HEAD_SHARD):
        load_drafter(str(copy), target)


def test_a_gru_with_biases_loads(target, copy):
    _change_tensors(
        copy,
        lambda tensors: tensors.update(
            {"prefix_gru.bias_ih_l0": torch.ones(384), "prefix_gru.bias_hh_l0": torch.ones(384)}
        ),
    )
    assert load_drafter(str(copy), target).head.input_bias is not None


def test_what_is_neither_here_nor_on_the_hub_is_one_clear_error(target):
    for load in (
        lambda path: load_drafter(path, target),
        lambda path: load_target(path, dtype=torch.float32, device="cpu"),
    ):
        with pytest.raises(CheckpointError, match="'nobody/nothing' is neither a folder here"):
            load("nobody/nothing")
