"""The engine's part of a round under ``FakeTensorMode``, where any host read and any shape from a value raises."""

from types import SimpleNamespace

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from vllm_dartree.engine.commit import CachedLayer, commit_rows
from vllm_dartree.engine.kv_layout import KVLayout
from vllm_dartree.engine.state import TreeState
from vllm_dartree.tree import DraftTree, walk

REQUESTS, BUDGET, DEPTH = 4, 16, 7


class _MovesByIndex(KVLayout):
    """A cache of one row per slot; a skipped pair copies slot 0 onto itself."""

    def attend(self, *args: object) -> None:
        raise AssertionError("nothing is verified here")

    def move(self, kv_caches, source, destination) -> None:
        moves = source >= 0
        for cache in kv_caches:
            cache[destination.where(moves, 0).flatten()] = cache[source.where(moves, 0).flatten()]


def _batch(num_drafts: list[int], prefill: int) -> SimpleNamespace:
    """An input batch whose first request still has ``prefill`` tokens in front of its rows."""
    rows = np.array(num_drafts) + 1
    scheduled = rows + np.array([prefill, *[0] * (len(rows) - 1)])
    ends = np.cumsum(scheduled)
    return SimpleNamespace(
        num_reqs=len(rows),
        num_tokens=int(ends[-1]),
        cu_num_logits=torch.tensor([0, *np.cumsum(rows).tolist()], dtype=torch.int32),
        logits_indices=torch.tensor([t for end, n in zip(ends, rows, strict=True) for t in range(end - n, end)]),
        expanded_local_pos=torch.tensor([i for n in rows for i in range(n)], dtype=torch.int32),
        idx_mapping=torch.arange(len(rows)),
        positions=torch.arange(int(ends[-1])),
    )


def test_begin_step_walk_and_commit_never_read_the_device():
    with FakeTensorMode():
        state = TreeState(REQUESTS, BUDGET, DEPTH, torch.device("cpu"))
        tree = DraftTree(
            torch.zeros(REQUESTS, BUDGET, dtype=torch.int64),
            torch.zeros(REQUESTS, BUDGET + 1, dtype=torch.int64),
            torch.zeros(REQUESTS, BUDGET),
        )
        state.write(torch.zeros(REQUESTS, dtype=torch.int64), tree)
        batch = _batch([BUDGET, 3, 0, BUDGET], prefill=5)
        step = state.begin_step(batch, torch.zeros(REQUESTS, dtype=torch.int32))
        chosen = step.padded(torch.zeros(step.tokens.shape[0], dtype=torch.int64))
        step.accepted = walk(chosen[:, 1:], step.parents, step.topology, chosen, DEPTH, step.num_nodes)
        layer = CachedLayer("layer", SimpleNamespace(kv_cache=torch.zeros(512, 8)), _MovesByIndex())
        slots = {"layer": torch.arange(batch.num_tokens)}
        moved = commit_rows(step, [layer], slots, batch.positions, [torch.zeros(batch.num_tokens, 8)])
        assert moved[0].shape == (batch.num_tokens, 8)


def test_positions_follow_depths_and_placeholders_stay_sequential():
    state = TreeState(2, 4, 3, torch.device("cpu"))
    tree = DraftTree(
        torch.tensor([[5, 6, 7, 8]] * 2),
        torch.tensor([[0, 0, 0, 1, 3]] * 2),
        torch.tensor([[-1.0, -2.0, -3.0, -4.0]] * 2),
    )
    state.write(torch.tensor([0, 1]), tree)
    batch = _batch([4, 4], prefill=0)
    batch.positions = torch.tensor([10, 11, 12, 13, 14, 20, 21, 22, 23, 24])
    # The second request's anchor lies in its prefill: its drafts are placeholders.
    step = state.begin_step(batch, torch.tensor([8, 21]))
    assert batch.positions.tolist() == [10, 11, 11, 12, 13, 20, 21, 22, 23, 24]
    assert step.num_nodes.tolist() == [4, 0]
    assert step.verify_only


def test_rows_of_the_path_move_left_over_each_other_and_all_else_stays():
    state = TreeState(2, 4, 3, torch.device("cpu"))
    tree = DraftTree(
        torch.tensor([[5, 6, 7, 8]] * 2),
        torch.tensor([[0, 0, 0, 2, 3]] * 2),
        torch.tensor([[-1.0, -2.0, -3.0, -4.0]] * 2),
    )
    state.write(torch.tensor([0, 1]), tree)
    batch = _batch([4, 4], prefill=3)
    sequential = batch.positions.clone()
    step = state.begin_step(batch, torch.tensor([0, 0]))
    # The first request accepts rows 2, 3 and 4; the second nothing.
    chosen = torch.tensor([[6, 0, 7, 8, 1], [9, 9, 9, 9, 9]])
    step.accepted = walk(tree.tokens, step.parents, step.topology, chosen, 3, step.num_nodes)
    cache, hidden = torch.arange(13.0).view(13, 1), torch.arange(13.0).view(13, 1)
    layer = CachedLayer("layer", SimpleNamespace(kv_cache=cache.clone()), _MovesByIndex())
    kept = step.accepted.path[0]
    assert kept.tolist() == [0, 2, 3, 4]
    moved = commit_rows(step, [layer], {"layer": torch.arange(13)}, batch.positions, [hidden])
    expected = [0, 1, 2, 3, 5, 6, 7, 7, 8, 9, 10, 11, 12]
    assert moved[0].flatten().tolist() == expected
    assert layer.attention.kv_cache.flatten().tolist() == expected
    assert torch.equal(batch.positions, sequential)
