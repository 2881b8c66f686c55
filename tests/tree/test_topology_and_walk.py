"""Depths, ancestors and the accepted path against their definitions, and all of it without a host read."""

import pytest
import torch
from drafts import HEADS, random_head
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from vllm_dartree.tree import TreeConfig, draft_block, expand, prune, topology, walk
from vllm_dartree.tree.oracles import walk_naive


@st.composite
def trees(draw, max_rows=24, vocab=4):
    """Parents and tokens of a random tree whose siblings differ, dead nodes last: ``(tokens, parents)``."""
    tokens, parents, taken = [], [0], set()
    for row in range(1, draw(st.integers(1, max_rows))):
        parent, token = draw(st.integers(0, row - 1)), draw(st.integers(0, vocab - 1))
        if (parent, token) in taken:
            break
        taken.add((parent, token))
        parents.append(parent)
        tokens.append(token)
    dead = draw(st.integers(0, 3))
    return tokens + [0] * dead, parents + [-1] * dead


def closure(parents):
    """Ancestor rows of every row, itself included, by following parents one at a time."""
    result = []
    for row in range(len(parents)):
        chain = [row]
        while parents[row] >= 0 and row != 0:
            row = parents[row]
            chain.append(row)
        result.append(chain)
    return result


@settings(max_examples=1500)
@given(st.lists(trees(), min_size=1, max_size=3))
def test_mask_is_the_transitive_closure_of_parents(batch):
    rows = max(len(parents) for _, parents in batch)
    parents = torch.tensor([p + [-1] * (rows - len(p)) for _, p in batch])
    tree = topology(parents)
    for r in range(len(batch)):
        chains = closure(parents[r].tolist())
        for row, chain in enumerate(chains):
            assert tree.ancestors[r, row].nonzero()[:, 0].tolist() == sorted(chain)
            assert tree.depths[r, row] == len(chain) - 1
    deepest = int(tree.depths.max())
    bounded = topology(parents, max_depth=max(deepest, 1))
    assert torch.equal(bounded.ancestors, tree.ancestors) and torch.equal(bounded.depths, tree.depths)


@settings(max_examples=2500)
@given(trees(), st.lists(st.integers(0, 3), min_size=32, max_size=32), st.integers(0, 30))
def test_walk_equals_the_naive_walk_on_any_prefix(tree, chosen, num_nodes):
    tokens, parents = tree
    chosen = chosen[: len(parents)]
    as_rows = torch.tensor([tokens], dtype=torch.int64), torch.tensor([parents])
    depth = max(len(parents) - 1, 1)
    accepted = walk(*as_rows, topology(as_rows[1]), torch.tensor([chosen]), depth, torch.tensor([num_nodes]))
    kept = min(num_nodes, len(tokens))
    path, emitted = walk_naive(tokens[:kept], parents[: kept + 1], chosen)
    missing = [-1] * (depth + 1 - len(path))
    assert accepted.path[0].tolist() == path + missing
    assert accepted.tokens[0].tolist() == emitted + missing
    assert accepted.num_accepted.tolist() == [len(path) - 1]


def test_walk_keeps_requests_apart():
    parents = torch.tensor([[0, 0, 1, 1], [0, 0, 0, 2], [0, -1, -1, -1]])
    tokens = torch.tensor([[5, 6, 7], [5, 6, 7], [0, 0, 0]])
    chosen = torch.tensor([[5, 7, 1, 2], [6, 1, 7, 3], [0, 9, 9, 9]])
    accepted = walk(tokens, parents, topology(parents), chosen, max_depth=3)
    assert accepted.path.tolist() == [[0, 1, 3, -1], [0, 2, 3, -1], [0, -1, -1, -1]]
    assert accepted.tokens.tolist() == [[5, 7, 2, -1], [6, 7, 3, -1], [0, -1, -1, -1]]
    assert accepted.num_accepted.tolist() == [2, 2, 0]


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("variant", ["pruned", "fixed", "chain"])
def test_propose_topology_and_walk_never_read_the_device(kind, variant):
    config = TreeConfig(variant=variant)
    with FakeTensorMode():
        head = random_head(kind, 200, 16, torch.randn)
        block = draft_block(torch.zeros(4, dtype=torch.int64), torch.randn(4, 15, 16), torch.randn(4, 15, 200), 64)
        tree = prune(expand(head, block, config.widths(15)), config.budget, config.depth_bonus)
        shape = topology(tree.parents, max_depth=15)
        chosen = torch.zeros(4, 65, dtype=torch.int64)
        accepted = walk(tree.tokens, tree.parents, shape, chosen, 15, torch.zeros(4, dtype=torch.int64))
        assert shape.ancestors.shape == (4, 65, 65) and accepted.path.shape == (4, 16)
        with pytest.raises(Exception, match=r"item|data-dependent|aten\._local_scalar_dense"):
            accepted.num_accepted.max().item()
