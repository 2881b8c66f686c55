"""The benchmark of the engine, end to end on the bundled pair: its counts mean something there and its times do not."""

import json

import pytest
from bench_vllm import Served, compare, main, must_be_identical, percentile

from vllm_dartree.assets import DSPARK


def _row(method: str, tokens: list[list[int]], speed: float, temperature: float = 0.0) -> dict[str, object]:
    cell = {"data_set": "x", "temperature": temperature, "concurrency": 1, "dtype": "float32"}
    return {"method": method, "tokens_per_second": speed, "token_ids": tokens, **cell}


def test_rows_are_compared_with_no_speculation_under_the_same_load():
    rows = [
        _row("none", [[1, 2], [3]], 10.0),
        _row("dartree", [[1, 2], [4]], 40.0),
        _row("dflash", [[1], [3]], 20, 1.0),
    ]
    compare(rows)
    assert (rows[1]["speedup"], rows[1]["identical"]) == (4.0, 0.5)
    assert "speedup" not in rows[2]
    assert must_be_identical(rows[1]) and not must_be_identical(rows[2])


def test_times_of_a_request():
    one = Served(tokens=[1, 2, 3, 4, 5], asked=1.0, chunks=[1.5, 2.0, 3.5])
    assert (one.time_to_first_token, one.time_per_token) == (0.5, 0.5)
    assert [percentile([4.0, 1.0, 3.0, 2.0], share) for share in (0.5, 0.99)] == [3.0, 4.0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--methods", "none,magic"], "--methods has 'magic', but it must be some of none, dflash"),
        # Only a Domino drafter holds a plain one.
        (["--methods", "dflash", "--draft", str(DSPARK)], "--methods has 'dflash', which needs --dflash-draft"),
        (["--concurrency", "1,0"], "--concurrency is '1,0', but it must be numbers >= 1"),
        (["--draft", "no/such-model"], "--draft is 'no/such-model', which is neither a folder here"),
        (["--out", "/nonexistent/bench.json"], "--out is '/nonexistent/bench.json', but it must be a file"),
    ],
)
def test_mistakes_are_one_clear_line(words, message, capsys):
    assert main(words) == 2
    assert f"bench_vllm.py: error: {message}" in capsys.readouterr().err


@pytest.mark.slow
def test_it_runs_on_the_bundled_pair(tmp_path, capfd):
    out = tmp_path / "bench.json"
    words = ["--methods", "none,dartree", "--max-samples", "2", "--max-new-tokens", "10", "--temperatures", "0"]
    assert main([*words, "--concurrency", "1,2", "--budget", "8", "--width", "3", "--out", str(out)]) == 0
    rows = {(row["method"], row["concurrency"]): row for row in json.loads(out.read_text())["rows"]}
    assert len(rows) == 4
    assert all(row["identical"] == 1 for row in rows.values())
    assert rows["none", 1]["tau"] == 1 and rows["none", 1]["steps"] == 20
    assert rows["dartree", 1]["tau"] > 2
    assert rows["dartree", 2]["steps"] < rows["dartree", 1]["steps"] < rows["none", 1]["steps"]
    printed = capfd.readouterr().out
    assert "speed means nothing here" in printed
    assert "| prompts | 0 | 2 | dartree |" in printed
