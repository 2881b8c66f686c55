"""The benchmark of a round, at tiny sizes on this CPU."""

import json

import bench_round
import pytest

TINY = "--hidden 16 --state 8 --emb 4 --vocabulary 60 --slots 5 --layers 3 --budget 12 --width 4 --candidates 8".split()


@pytest.fixture(scope="module")
def figures(tmp_path_factory) -> dict:
    path = tmp_path_factory.mktemp("bench") / "figures.json"
    bench_round.main([*TINY, "--requests", "1", "3", "--heap-requests", "1", "--repeats", "1", "--json", str(path)])
    return json.loads(path.read_text())


def test_every_row_has_the_ratio_and_its_floor(figures):
    assert [row["requests"] for row in figures["rows"]] == [1, 3]
    for row in figures["rows"]:
        assert row["ratio_vs_sequential_heap"] == pytest.approx(row["heap_ms"] / row["eager_ms"])
        assert row["floor_ms"] == pytest.approx(sum(row["bytes"].values()) / figures["bandwidth_bytes_per_s"] * 1e3)
        assert row["ratio_ceiling"] > 0 and figures["peak_operations_per_s"] > 0
        assert set(row["stages_ms"]) == set(row["bytes"]) == set(row["launches_fused"])
        assert row["fused_ms"] is None


def test_launches_do_not_grow_with_requests_or_layers(figures):
    first, last = figures["rows"]
    assert first["launches_fused"] == last["launches_fused"]
    assert first["launches_eager"] == last["launches_eager"]
    fused, eager = first["launches_fused"], first["launches_eager"]
    assert [fused[stage] for stage in ("prune", "plant", "accept")] == [1, 1, 1]
    assert 3 * sum(fused.values()) < sum(eager.values())


def test_a_depth_is_five_launches(figures, tmp_path):
    """Two products, the gather of embeddings and two kernels."""
    path = tmp_path / "deeper.json"
    deeper = [*TINY]
    deeper[deeper.index("--slots") + 1] = "8"
    bench_round.main([*deeper, "--requests", "1", "--repeats", "1", "--json", str(path)])
    (row,) = json.loads(path.read_text())["rows"]
    assert row["launches_fused"]["expand"] - figures["rows"][0]["launches_fused"]["expand"] == 3 * 5
