"""An OpenAI server with dartree, in processes of its own."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import requests

from vllm_dartree.assets import TARGET
from vllm_dartree.emulation import child_environment


def child_processes() -> dict[str, str]:
    """The environment for engines in processes of their own."""
    environment = os.environ | child_environment() | {"HF_HUB_OFFLINE": "1"}
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    return environment


@dataclass
class Server:
    url: str
    process: subprocess.Popen

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels, or over those that begin as given: ``name{label="value"``."""
        lines = requests.get(f"{self.url}/metrics", timeout=60).text.splitlines()
        values = [
            float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name}{{", f"{name} ", f"{name},"))
        ]
        assert values, f"the server has no metric {name}"
        return sum(values)


@contextmanager
def server(speculative: dict[str, object], *arguments: str, **variables: str) -> Iterator[Server]:
    """The server with these command line arguments and environment variables beside the defaults."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    command += ["--model", str(TARGET), "--served-model-name", "tiny", "--dtype", "float32", "--max-model-len", "512"]
    command += ["--max-num-seqs", "16", "--max-num-batched-tokens", "2048", "--kv-cache-memory-bytes", str(64 << 20)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--speculative-config", json.dumps(speculative)]
    process = subprocess.Popen([*command, *arguments], env=child_processes() | variables, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 400
        while True:
            assert process.poll() is None, "the server ended while it started"
            assert time.monotonic() < deadline, "the server did not start"
            try:
                if requests.get(f"{url}/health", timeout=2).ok:
                    break
            except (requests.ConnectionError, requests.Timeout):
                time.sleep(0.5)
        yield Server(url, process)
    finally:
        # A test may have ended it, or its leader alone.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
