"""A multimodal target, text and images, in a process of its own: vLLM's models of such targets want torchvision.

PyPI's torchvision loads no operators beside a CPU build of torch and then fails to import, so that the set-up removes
it. The models need its transforms alone: here it is unpacked, and declares the operators that it looks for itself, in
every process (vLLM inspects models in one of their own, unless its cache knows them).
"""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from engine import targets
from engine.engines import dartree, engine, run, tokens
from engine.servers import child_processes
from vllm import SamplingParams

pytestmark = pytest.mark.slow

TORCHVISION = "torchvision==0.28.0"  # of torch 2.13
OPERATORS = """
import torch

for operator in ("nms", "qnms"):
    torch.library.define(f"torchvision::{operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""
PROGRAM = """
import json, sys

from PIL import Image
from vllm import LLM, SamplingParams

job = json.loads(sys.stdin.read())
image = Image.new("RGB", (16, 16), "red")
ask = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
ask.append({"prompt_token_ids": job["prompt_of_image"], "multi_modal_data": {"image": image}})
params = [SamplingParams(temperature=0, max_tokens=24), SamplingParams(temperature=1.0, seed=5, max_tokens=24)]
params += params[:1]
settings = {"dtype": "float32", "enforce_eager": True, "max_model_len": 512, "max_num_seqs": 4}
settings |= {"kv_cache_memory_bytes": 64 << 20, "disable_log_stats": False, "max_num_batched_tokens": 1024}
engines = [LLM(job["target"], **settings, speculative_config=config) for config in (None, job["dartree"])]
said = [[list(one.outputs[0].token_ids) for one in llm.generate(ask, params, use_tqdm=False)] for llm in engines]
counters = {metric.name: getattr(metric, "value", 0) for metric in engines[1].get_metrics()}
with open(job["out"], "w") as file:
    json.dump({"said": said, "accepted": counters["vllm:spec_decode_num_accepted_tokens"]}, file)
"""


@pytest.fixture(scope="module")
def torchvision(pytestconfig, tmp_path_factory) -> str:
    cache = Path(pytestconfig.cache.mkdir("torchvision"))
    if not list(cache.glob("*.whl")):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(cache), TORCHVISION]
        subprocess.run(command, check=True, timeout=300)
    folder = tmp_path_factory.mktemp("torchvision")
    with zipfile.ZipFile(next(cache.glob("*.whl"))) as wheel:
        wheel.extractall(folder)
    package = folder / "torchvision" / "__init__.py"
    package.write_text(OPERATORS + package.read_text())
    return str(folder)


def test_text_and_images(prompts, tmp_path, torchvision):
    out = tmp_path / "said.json"
    job = {
        "target": targets.multimodal(tmp_path / "llava"),
        "dartree": dartree(),
        "prompts": prompts[:2],
        "prompt_of_image": [*prompts[0], 1, *prompts[1]],
        "out": str(out),
    }
    environment = child_processes() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    environment["PYTHONPATH"] += os.pathsep + torchvision
    program = [sys.executable, "-c", PROGRAM]
    subprocess.run(program, input=json.dumps(job), text=True, env=environment, check=True, timeout=400)
    result = json.loads(out.read_text())
    plain, trees = result["said"]
    assert trees == plain
    assert result["accepted"] > 20
    # Its language model is the bundled target, which is better known without eyes.
    greedy = SamplingParams(temperature=0, max_tokens=24)
    assert trees[0] == tokens(run(engine(), prompts[:1], greedy))[0]
