"""What README says of vLLM's features is backed row by row."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SECTION = (ROOT / "README.md").read_text().partition("## vLLM's features")[2].partition("\n## ")[0]
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")] for line in SECTION.splitlines() if line.startswith("| ")
]
ROWS = [row for row in ROWS if row[0] != "feature"]
SOURCES = [(path.stem, path.read_text()) for path in (ROOT / "tests").rglob("test_*.py")]


def test_the_table_is_found():
    assert len(ROWS) > 30


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_row_names_a_verdict_and_tests_that_exist(row):
    _, verdict, proof = row
    assert verdict.partition(",")[0] in ("works", "chain", "refused")
    named = re.findall(r"`(test_\w+)\.(test_\w+)`", proof)
    assert named
    for module, test in named:
        assert any(stem == module and f"def {test}(" in source for stem, source in SOURCES)


def test_what_is_refused_is_in_the_table():
    from vllm_dartree.emulation import activate

    activate()
    from vllm_dartree.features import UNSUPPORTED

    refused = " ".join(row[0] for row in ROWS if row[1] == "refused")
    for feature in UNSUPPORTED:
        kinds = r"pooling|diffusion|encoder-decoder|Mamba|MLA|M-RoPE|ALiBi|sinks"
        words = re.findall(r"\w+_\w+", feature.name) or re.findall(kinds, feature.name)
        assert words and all(word in refused for word in words), feature.name
