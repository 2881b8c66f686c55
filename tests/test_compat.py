"""The table of seams holds for every vLLM that this package says it works on, and a seam that breaks is named."""

import ast
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from run_on_vllm_033 import download_wheel

from vllm_dartree import compat
from vllm_dartree.emulation import activate

PACKAGE = Path(compat.__file__).parent


def test_the_installed_version_has_all_seams_in_its_source():
    assert compat.check_source(compat.installed_folder()) == []


def test_the_installed_version_has_all_seams_when_it_is_imported():
    activate()
    assert compat.check_installed() == []


@pytest.fixture(scope="session")
def wheel(pytestconfig) -> Path:
    """The CUDA wheel of 0.33.0, kept between runs; it is never installed, and hardly unpacked."""
    return download_wheel(pytestconfig.cache.mkdir("vllm-wheels"))


@pytest.mark.slow
def test_version_0_33_has_all_seams_in_its_source(wheel):
    assert compat.check_source(zipfile.Path(wheel)) == []


def test_a_vllm_that_is_not_there_lacks_everything(tmp_path):
    problems = compat.check_source(tmp_path)
    assert len(problems) == len(compat.SEAMS)
    assert str(problems[0]) == f"{compat.SEAMS[0]}: there is no such module"


@pytest.fixture
def source(tmp_path):
    """A small source tree, and the problems that a seam has in it."""

    def make(files: dict[str, str]):
        for name, text in files.items():
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return lambda seam: compat._Source(tmp_path).problem(seam)

    return make


RUNNER = """
from .base import Base as Common
import typing

if typing.TYPE_CHECKING:
    from vllm.other import Thing


class Runner(Common):
    kind: str = "v2"

    def __init__(self, config, device):
        self.config, self.device = config, device

    def prepare(self, batch, *, fast=False):
        return batch

    @property
    def length(self):
        return 1

    @staticmethod
    def name():
        return "runner"


def launch(tokens, rows=1):
    return tokens
"""
FILES = {
    "vllm/__init__.py": "try:\n    from vllm.runner import Runner\nexcept ImportError:\n    Runner = None\n",
    "vllm/runner.py": RUNNER,
    "vllm/base.py": "class Base:\n    def inherited(self, x): ...\n",
    "vllm/other.py": "Thing = object\n",
}


@pytest.mark.parametrize(
    "seam",
    [
        compat.Seam("vllm.runner"),
        compat.Seam("vllm", "Runner.prepare", ("batch",)),
        compat.Seam("vllm.runner", "Runner.inherited", ("x",), closed=True),
        compat.Seam("vllm.runner", "Runner.name", (), closed=True),
        compat.Seam("vllm.runner", "Runner.length", ()),
        compat.Seam("vllm.runner", "launch", ("tokens",)),
        compat.Seam("vllm.runner", "Thing"),
        compat.Seam("vllm.runner", "Runner", members=("kind", "config", "device", "length", "inherited")),
    ],
    ids=str,
)
def test_names_are_found_as_python_finds_them(source, seam):
    assert source(FILES)(seam) is None


@pytest.mark.parametrize(
    ("seam", "words"),
    [
        (compat.Seam("vllm.gone"), "there is no such module"),
        (compat.Seam("vllm.runner", "Walker"), "the module has no 'Walker'"),
        (compat.Seam("vllm.runner", "Runner.gone"), "'Runner' has no 'gone'"),
        (compat.Seam("vllm.runner", "Runner", members=("kind", "gone")), "it has no 'gone'"),
        (compat.Seam("vllm.runner", "Runner.prepare", ("input_batch",)), "its parameters are (batch, fast), expected"),
        (compat.Seam("vllm.runner", "Runner.prepare", ("batch",), closed=True), "it takes further parameters: fast"),
        (compat.Seam("vllm.runner", "Runner.__init__", ("config",)), "it needs further parameters: device"),
        (compat.Seam("vllm.runner", "Runner.kind", ()), "it is not a function"),
    ],
    ids=str,
)
def test_what_is_not_as_expected_is_named(source, seam, words):
    assert words in source(FILES)(seam)


def mutate(source: str, seam: compat.Seam) -> str:
    """The source without the function of a seam, or with its first parameter renamed."""
    tree = ast.parse(source)
    name = seam.name.split(".")[-1]
    for node in ast.walk(tree):
        for statement in getattr(node, "body", []) if not isinstance(node, (ast.Lambda, ast.IfExp)) else []:
            if isinstance(statement, ast.FunctionDef) and statement.name == name:
                if seam.parameters:
                    arguments = statement.args.args
                    next(a for a in arguments if a.arg == seam.parameters[0]).arg = "renamed"
                else:
                    statement.name = "removed"
    return ast.unparse(tree)


@pytest.mark.parametrize(
    "seam",
    [seam for seam in compat.SEAMS if seam.parameters is not None and seam.module.startswith("vllm.v1.worker.gpu.")],
    ids=str,
)
def test_a_renamed_argument_or_a_removed_method_of_the_real_source_is_reported(seam, tmp_path):
    module = f"{seam.module.replace('.', '/')}.py"
    mutated = tmp_path / module
    mutated.parent.mkdir(parents=True)
    mutated.write_text(mutate((compat.installed_folder() / module).read_text(), seam))
    problem = compat._Source(tmp_path).problem(seam)
    assert problem is not None
    assert "renamed" in problem or "has no" in problem


@pytest.mark.parametrize(
    "seam",
    [
        compat.Seam("vllm.v1.worker.gpu.gone"),
        compat.Seam("vllm.config", "VllmConfig", members=("gone",)),
        replace(compat.Seam("vllm.sampling_params", "SamplingParams.verify", ("model_config",)), closed=True),
        compat.Seam("vllm.v1.worker.gpu.sample.sampler", "Sampler.sample", ("rows",)),
        compat.Seam("vllm.v1.worker.gpu.sample.sampler", "Sampler.gone"),
    ],
    ids=str,
)
def test_both_ways_of_checking_report_what_is_missing(seam, monkeypatch):
    activate()
    monkeypatch.setattr(compat, "SEAMS", (seam,))
    assert [problem.seam for problem in compat.check_source(compat.installed_folder())] == [seam]
    assert [problem.seam for problem in compat.check_installed()] == [seam]


def imported_from_vllm() -> set[tuple[str, str]]:
    """Everything that the package imports from vLLM, as (module, name)."""
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                found |= {(node.module, alias.name) for alias in node.names}
    return found


# Imported for annotations, or beside a command, where their absence is an error of its own.
NOT_LEANED_ON = {("vllm", "__version__"), ("vllm.entrypoints.cli.main", "main")}


def test_every_import_of_vllm_is_in_the_table():
    table = {(seam.module, seam.name.split(".")[0]) for seam in compat.SEAMS}
    table |= {tuple(seam.module.rsplit(".", 1)) for seam in compat.SEAMS}
    missing = imported_from_vllm() - table - NOT_LEANED_ON
    assert not missing, f"add a Seam for each to vllm_dartree/compat.py: {sorted(missing)}"
