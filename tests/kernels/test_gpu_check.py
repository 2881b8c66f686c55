"""The GPU check's own functions, at tiny sizes in the interpreter."""

import gpu_check
import pytest
import torch

from vllm_dartree.tree import TreeConfig


def small_verify(dtype: torch.dtype = torch.float32, **changes: object) -> gpu_check.Verify:
    return gpu_check.random_verify([0, 21], 6, "cpu", dtype, kv_heads=2, groups=2, head_size=32, **changes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_attention_is_found_right(dtype):
    tolerance = gpu_check.TOLERANCES[dtype]
    assert gpu_check.attention_error(small_verify(dtype), num_splits=2) < tolerance
    assert gpu_check.attention_error(small_verify(dtype, sliding_window=9)) < tolerance
    assert gpu_check.attention_error(small_verify(dtype), soft_cap=2.0) < tolerance
    assert gpu_check.sdpa_error(small_verify(dtype)) < tolerance


def test_wrong_attention_is_found_wrong(monkeypatch):
    def causal(*args: object, **options: object) -> None:
        args = list(args)
        args[8] = torch.ones_like(args[8]).tril()
        gpu_check.tree_attention_torch(*args)

    monkeypatch.setattr(gpu_check, "tree_attention", causal)
    assert gpu_check.attention_error(small_verify()) > 0.1
    assert gpu_check.sdpa_error(small_verify()) > 0.1


def test_moves_are_found_right_and_wrong(monkeypatch):
    assert gpu_check.moves_as_its_twin("cpu", torch.float32, 2, 5, head_size=16)
    monkeypatch.setattr(gpu_check, "move_slots", lambda *args: None)
    assert not gpu_check.moves_as_its_twin("cpu", torch.float32, 2, 5, head_size=16)


def test_the_tree_stage_runs():
    head = gpu_check.random_head(16, 40, 8, 4, 3, "cpu", torch.float32)
    tree, shape = gpu_check.random_tree_stage(head, 2, 3, TreeConfig(budget=6, width=4, candidates=8)).run()
    assert tree.tokens.shape == (2, 6)
    assert shape.depths.max() <= 3


def test_the_table_lists_what_was_found():
    report = gpu_check.Report([])
    report.error("kernel", 1e-6, 1e-4)
    report.time("step", 1.5)
    assert report.passed
    report.check("graph", False)
    assert not report.passed
    assert [line.split() for line in report.table().splitlines()][-1] == ["graph", "FAILED"]


def test_without_a_gpu_it_says_so(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main() == 2
    assert "needs a GPU" in capsys.readouterr().err
