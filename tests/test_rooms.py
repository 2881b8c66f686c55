"""The algorithm knows nothing of vLLM, and arrows between rooms point one way."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "vllm_dartree"
# What a room may import of this package; METHOD's algorithm sits at the bottom.
ROOMS = {
    "kernels": {"kernels"},
    "tree": {"tree", "kernels"},
    "heads": {"heads", "tree", "kernels"},
    "reference": {"reference", "heads", "tree", "hub"},
    "emulation": {"emulation"},
    "engine": {"engine", "config", "features", "grammars", "heads", "tree", "kernels"},
}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            found.add(node.module)
            if node.module == "vllm_dartree":
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_import_only_what_lies_below_them(room):
    for path in (PACKAGE / room).rglob("*.py"):
        for module in imports(path):
            top, *rest = module.split(".")
            assert top != "vllm" or room in ("engine", "emulation"), f"{path} imports {module}"
            if top == "vllm_dartree" and rest:
                assert rest[0] in ROOMS[room], f"{path} imports {module}"
