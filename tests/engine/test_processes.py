"""Engines in processes of their own."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from engine import drafters
from engine.engines import counted, dartree, engine, run, tokens
from engine.servers import child_processes, server
from vllm import SamplingParams

from vllm_dartree.assets import DFLASH2, DOMINO, DSPARK, TARGET

pytestmark = pytest.mark.slow

OFFLINE = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.engine.arg_utils import EngineArgs
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
        "with_plugin": hasattr(EngineArgs.create_speculative_config, "dartree"),
    }
    with open(job["out"], "w") as file:
        json.dump(result, file)
"""


def _offline(tmp_path, prompts, settings: dict[str, object], **environment: str) -> dict[str, object]:
    """What an engine in a process of its own says to the prompts, greedily."""
    script, out = tmp_path / "offline.py", tmp_path / "result.json"
    script.write_text(OFFLINE)
    defaults = {
        "model": str(TARGET),
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 1024,
        "kv_cache_memory_bytes": 64 << 20,
        "disable_log_stats": False,
    }
    job = {"settings": defaults | settings, "prompts": prompts, "max_tokens": 24, "out": str(out)}
    command = [sys.executable, str(script)]
    subprocess.run(
        command, input=json.dumps(job), text=True, env=child_processes() | environment, check=True, timeout=400
    )
    return json.loads(out.read_text())


@pytest.mark.parametrize("name", ["domino", "dspark", "dflash2", "lilicorr"])
def test_tensor_parallel_gives_the_same_tokens(prompts, tmp_path, name):
    bundled = {"domino": DOMINO, "dspark": DSPARK, "dflash2": DFLASH2}
    drafter = bundled.get(name) or drafters.lilicorr(tmp_path / name)
    settings = {"tensor_parallel_size": 2, "speculative_config": dartree(model=str(drafter))}
    # Two workers on the two cores that a small machine has.
    result = _offline(tmp_path, prompts[:3], settings, VLLM_CPU_OMP_THREADS_BIND="0|1")
    params = SamplingParams(temperature=0, max_tokens=24)
    assert result["tokens"] == tokens(run(engine(), prompts[:3], params))
    # A head or an embedding that is wrong on one rank would leave tokens right and ruin the drafts.
    trees = engine(dartree(model=str(drafter)))
    with counted(trees) as drafts:
        run(trees, prompts[:3], params)
    assert result["async_scheduling"]
    counters = result["counters"]
    assert counters["vllm:spec_decode_num_drafts"] == drafts.rounds
    assert counters["vllm:spec_decode_num_accepted_tokens"] == drafts.accepted


def test_the_plugin_changes_nothing_for_vllms_own_dflash(prompts, tmp_path, drafter_with):
    dflash = {"method": "dflash", "model": drafter_with(projector_type=None), "num_speculative_tokens": 15}
    settings = {"speculative_config": dflash}
    without = _offline(tmp_path, prompts[:3], settings, VLLM_PLUGINS="")
    with_plugin = _offline(tmp_path, prompts[:3], settings)
    assert (without.pop("with_plugin"), with_plugin.pop("with_plugin")) == (False, True)
    assert with_plugin == without
    assert with_plugin["counters"]["vllm:spec_decode_num_accepted_tokens"] > 0


def test_data_parallel_gives_the_same_tokens(prompts):
    params = SamplingParams(temperature=0, max_tokens=24)
    expected = tokens(run(engine(), prompts[:6], params))
    with server(dartree(), "--data-parallel-size", "2", VLLM_CPU_OMP_THREADS_BIND="nobind") as served:
        client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", timeout=300)

        def complete(prompt: list[int]) -> list[int]:
            ask = {"model": "tiny", "prompt": prompt, "max_tokens": 24, "temperature": 0}
            return client.completions.create(**ask, extra_body={"return_token_ids": True}).choices[0].token_ids

        with ThreadPoolExecutor(6) as pool:
            assert list(pool.map(complete, prompts[:6])) == expected
        for rank in (0, 1):
            assert served.metric(f'vllm:spec_decode_num_accepted_tokens_total{{engine="{rank}"') > 0
