"""The same plugin on vLLM 0.33, whose Python runs over the installed 0.32's binaries."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "scripts" / "run_on_vllm_033.py"


@pytest.mark.slow
@pytest.mark.timeout(1900)
def test_the_greedy_and_seeded_tests_pass_on_vllm_0_33():
    finished = subprocess.run([sys.executable, PROGRAM], capture_output=True, text=True, timeout=1800)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "vLLM 0.33.0+cpu from" in finished.stdout
    assert "7 passed" in finished.stdout
