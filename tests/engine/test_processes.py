"""Engines in processes of their own: tensor parallel, and the OpenAI server."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import openai
import pytest
import requests
from engine.engines import counted, dartree, engine, run, tokens
from vllm import SamplingParams

from vllm_dartree.assets import DFLASH2, DOMINO, DSPARK, TARGET
from vllm_dartree.emulation import child_environment

pytestmark = pytest.mark.slow

OFFLINE = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.platforms.cpu import CpuPlatform

# vLLM turns asynchronous scheduling off on CPUs; a GPU has it on, so the same is asked of the tree here.
check = CpuPlatform.check_and_update_config

def check_and_schedule_asynchronously(vllm_config):
    check(vllm_config)
    vllm_config.scheduler_config.async_scheduling = True

CpuPlatform.check_and_update_config = staticmethod(check_and_schedule_asynchronously)
if __name__ == "__main__":
    job = json.loads(sys.stdin.read())
    llm = LLM(**job["settings"])
    params = SamplingParams(temperature=0, max_tokens=job["max_tokens"])
    outputs = llm.generate([{"prompt_token_ids": p} for p in job["prompts"]], params, use_tqdm=False)
    counters = {m.name: m.value for m in llm.get_metrics() if "spec_decode_num" in m.name and hasattr(m, "value")}
    result = {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "counters": counters,
        "async_scheduling": llm.llm_engine.vllm_config.scheduler_config.async_scheduling,
    }
    with open(job["out"], "w") as file:
        json.dump(result, file)
"""


def _environment() -> dict[str, str]:
    environment = os.environ | child_environment()
    # Two workers on the two cores that a small machine has.
    environment |= {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "HF_HUB_OFFLINE": "1"}
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    return environment


@pytest.mark.parametrize("drafter", [DOMINO, DSPARK, DFLASH2], ids=lambda drafter: drafter.name)
def test_tensor_parallel_gives_the_same_tokens(prompts, tmp_path, drafter):
    script, out = tmp_path / "offline.py", tmp_path / "tokens.json"
    script.write_text(OFFLINE)
    settings = {
        "model": str(TARGET),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 1024,
        "kv_cache_memory_bytes": 64 << 20,
        "tensor_parallel_size": 2,
        "speculative_config": dartree(model=str(drafter)),
        "disable_log_stats": False,
    }
    job = {"settings": settings, "prompts": prompts[:3], "max_tokens": 24, "out": str(out)}
    command = [sys.executable, str(script)]
    subprocess.run(command, input=json.dumps(job), text=True, env=_environment(), check=True, timeout=400)
    params = SamplingParams(temperature=0, max_tokens=24)
    result = json.loads(out.read_text())
    assert result["tokens"] == tokens(run(engine(), prompts[:3], params))
    # A head or an embedding that is wrong on one rank would leave tokens right and ruin the drafts.
    trees = engine(dartree(model=str(drafter)))
    with counted(trees) as drafts:
        run(trees, prompts[:3], params)
    assert result["async_scheduling"]
    counters = result["counters"]
    assert counters["vllm:spec_decode_num_drafts"] == drafts.rounds
    assert counters["vllm:spec_decode_num_accepted_tokens"] == drafts.accepted


@contextmanager
def _server(speculative: dict[str, object]):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = {
        "--model": str(TARGET),
        "--served-model-name": "tiny",
        "--dtype": "float32",
        "--max-model-len": "512",
        "--max-num-seqs": "16",
        "--max-num-batched-tokens": "2048",
        "--kv-cache-memory-bytes": str(64 << 20),
        "--host": "127.0.0.1",
        "--port": str(port),
        "--speculative-config": json.dumps(speculative),
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    command += [word for pair in arguments.items() for word in pair]
    environment = _environment()
    del environment["VLLM_CPU_OMP_THREADS_BIND"]
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 180
        while True:
            assert process.poll() is None, "the server ended while it started"
            assert time.monotonic() < deadline, "the server did not start"
            try:
                if requests.get(f"{url}/health", timeout=2).ok:
                    break
            except requests.ConnectionError:
                time.sleep(0.5)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def test_served_streaming_and_not_and_16_at_once(prompts):
    params = SamplingParams(temperature=0, max_tokens=24)
    expected = tokens(run(engine(), prompts[:16], params))
    with _server(dartree(tree_width=8)) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=240)

        def complete(number: int) -> list[int]:
            ask = {"model": "tiny", "prompt": prompts[number], "max_tokens": 24, "temperature": 0}
            extra = {"return_token_ids": True}
            if number % 2:
                chunks = client.completions.create(**ask, stream=True, extra_body=extra)
                return [token for chunk in chunks for token in chunk.choices[0].token_ids or []]
            return client.completions.create(**ask, extra_body=extra).choices[0].token_ids

        assert complete(0) == expected[0]
        assert complete(1) == expected[1]
        with ThreadPoolExecutor(16) as pool:
            assert list(pool.map(complete, range(16))) == expected
        lines = requests.get(f"{url}/metrics", timeout=10).text.splitlines()
        values = {
            line.split("{")[0]: float(line.rsplit(" ", 1)[1])
            for line in lines
            if line.startswith("vllm:spec_decode_num")
        }
        drafts, accepted = (
            values["vllm:spec_decode_num_drafts_total"],
            values["vllm:spec_decode_num_accepted_tokens_total"],
        )
        trees = engine(dartree(tree_width=8))
        with counted(trees) as counts:
            run(trees, [prompts[0], prompts[1], *prompts[:16]], params)
        assert (drafts, accepted) == (counts.rounds, counts.accepted)
