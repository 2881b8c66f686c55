"""The GPU check's own functions, at tiny sizes in the interpreter."""

import importlib

import gpu_check
import pytest
import torch
import tree_round

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


def test_path_logits_are_found_right_and_wrong(monkeypatch):
    assert all(gpu_check.path_logits_as_their_twins("cpu", 12, 40).values())
    monkeypatch.setattr(gpu_check, "penalise_paths", lambda *args: None)
    monkeypatch.setattr(gpu_check, "forbid_bad_words", lambda *args: None)
    assert not any(gpu_check.path_logits_as_their_twins("cpu", 12, 40).values())


@pytest.fixture
def small_round() -> tree_round.Round:
    tree = TreeConfig(budget=10, width=4, candidates=8)
    sizes = tree_round.Sizes(
        hidden=16, state=8, emb=4, vocabulary=40, slots=3, layers=2, kv_heads=2, head_size=8, tree=tree
    )
    return tree_round.Round(tree_round.random_head(16, 40, 8, 4, 3, "cpu", torch.float32), sizes, 2)


def test_tree_kernels_are_found_right(small_round):
    found = gpu_check.tree_kernels_against_twins(small_round)
    assert set(found) == {"expand", "prune", "plant", "begin", "accept", "commit"}
    assert all(found.values())


@pytest.mark.parametrize(
    ("module", "kernel", "stage"),
    [
        ("tree.accept", "accept_walk", "accept"),
        ("tree.prune", "best_rows", "prune"),
        ("engine.kv_layout", "move_slots", "commit"),
    ],
)
def test_a_wrong_tree_kernel_is_found_wrong(small_round, monkeypatch, module, kernel, stage):
    module = importlib.import_module(f"vllm_dartree.{module}")  # the package's `prune` is a function
    twin = getattr(module, f"{kernel}_torch")

    def wrong(*args: object) -> object:
        if kernel == "move_slots":
            return None
        return tuple(result + 1 for result in twin(*args))

    monkeypatch.setattr(module, kernel, wrong)
    assert not gpu_check.tree_kernels_against_twins(small_round)[stage]


def test_the_pipeline_runs():
    report = gpu_check.Report([])
    sizes = gpu_check.PipelineSizes(32, 48, 3, 2, 1, 16, 200, 1, 8, 4)
    gpu_check.time_pipeline(report, sizes, "cpu", tokens=6)
    assert report.passed
    assert [name for name, _ in report.lines] == ["reference decoder, ar", "reference decoder, dartree"]


def test_the_table_lists_what_was_found():
    report = gpu_check.Report([])
    report.error("kernel", 1e-6, 1e-4)
    report.time("step", 1.5)
    assert report.passed
    report.check("graph", False)
    assert not report.passed
    assert [line.split() for line in report.table().splitlines()][-1] == ["graph", "FAILED"]
    report.bar("ratio", 1.2, 1.15)
    assert report.table().endswith("1.20x MISSED (bar: 1.15x)")


def test_without_a_gpu_it_says_so(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main() == 2
    assert "needs a GPU" in capsys.readouterr().err
