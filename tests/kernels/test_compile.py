"""The interpreter takes more than the compiler does, so the kernels are compiled too, for GPUs that are not here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["80", "90"])
def test_kernels_compile_and_fit_into_shared_memory(capability):
    interpreted = ("TRITON_INTERPRET", "TORCH_COMPILE_DISABLE", "DARTREE_EMULATION", "PYTHONPATH")
    environment = {name: value for name, value in os.environ.items() if name not in interpreted}
    program = Path(__file__).with_name("compile_for_gpus.py")
    finished = subprocess.run(
        [sys.executable, program, capability], env=environment, capture_output=True, text=True, timeout=300
    )
    assert finished.returncode == 0, finished.stderr
    for kernel in (
        "_tree_attention_kernel",
        "_merge_splits_kernel",
        "_move_slots_kernel",
        "_best_children_kernel",
        "_gru_step_kernel",
        "_best_rows_kernel",
        "_plant_kernel",
        "_accept_walk_kernel",
        "_begin_rows_kernel",
        "_path_tokens_kernel",
        "_penalise_paths_kernel",
        "_forbid_bad_words_kernel",
    ):
        assert f"{kernel} sm_{capability}" in finished.stdout
