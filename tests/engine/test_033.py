"""The same plugin on vLLM 0.33, whose Python runs over the installed 0.32's binaries."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "scripts" / "run_on_vllm_033.py"


@pytest.mark.slow
def test_tokens_on_vllm_0_33_equal_those_without_speculation():
    finished = subprocess.run([sys.executable, PROGRAM], capture_output=True, text=True, timeout=900)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "vLLM 0.33.0 from" in finished.stdout
