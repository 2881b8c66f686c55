"""Prune, plant, walk and the rows of a step: each kernel against its twin, on trees that hypothesis draws."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_dartree.kernels.accept_walk import accept_walk, accept_walk_torch
from vllm_dartree.kernels.best_rows import best_rows, best_rows_torch
from vllm_dartree.kernels.plant import plant, plant_torch, topology_torch
from vllm_dartree.kernels.verify_rows import Rows, begin_rows, begin_rows_torch, path_tokens, path_tokens_torch

SEEDS = st.integers(0, 2**31)


def random_supertree(generator: torch.Generator, requests: int, widths: list[int]):
    """Tokens, parents, depths and scores; many keys are equal, some nodes impossible."""
    parents, depths, first_parent, level = [], [], -1, 1
    scores = torch.zeros(requests, 1)
    levels = []
    for depth, width in enumerate(widths, start=1):
        parent = torch.randint(level, (requests, width), generator=generator)
        scores = scores.gather(1, parent) - torch.randint(3, (requests, width), generator=generator) * 0.5
        scores[torch.rand(scores.shape, generator=generator) < 0.1] = float("-inf")
        scores, order = scores.sort(descending=True, stable=True)
        parents.append(parent.gather(1, order) + first_parent)
        depths += [depth] * width
        levels.append(scores)
        first_parent, level = len(depths) - width, width
    tokens = torch.randint(1, 50, (requests, len(depths)), generator=generator)
    return tokens, torch.cat(parents, 1), torch.tensor(depths), torch.cat(levels, 1)


@settings(max_examples=60)
@given(SEEDS, st.integers(1, 3), st.lists(st.integers(1, 12), min_size=1, max_size=6), st.integers(1, 40))
def test_best_rows_equal_those_of_the_twin(seed, requests, widths, budget):
    supertree = random_supertree(torch.Generator().manual_seed(seed), requests, widths)
    actual, expected = (keep(*supertree, budget, -0.2) for keep in (best_rows, best_rows_torch))
    for name, of_kernel, of_twin in zip(("tokens", "parents", "scores"), actual, expected, strict=True):
        assert torch.equal(of_kernel, of_twin), name


@st.composite
def forests(draw, max_rows=24):
    """Parents ``[R, N]`` of trees with parents before children and dead nodes last, and tokens ``[R, N - 1]``."""
    rows, parents = draw(st.integers(2, max_rows)), []
    for _ in range(draw(st.integers(1, 3))):
        alive = draw(st.integers(1, rows))
        tree = [0] + [draw(st.integers(0, row - 1)) for row in range(1, alive)]
        parents.append(tree + [-1] * (rows - alive))
    parents = torch.tensor(parents)
    # The row's own number as token: siblings differ, and it is seen where a token came from.
    return torch.arange(1, rows).expand(len(parents), -1).where(parents[:, 1:] >= 0, 0), parents


def empty_state(slots: int, rows: int):
    """Poisoned, so that what is not written is seen."""
    ancestors = torch.ones(slots, rows, rows, dtype=torch.bool)
    return torch.full((slots, rows), 77), torch.full((slots, rows), 77), ancestors


@settings(max_examples=60)
@given(forests(), st.lists(st.booleans(), min_size=3, max_size=3))
def test_planting_equals_the_twin_and_leaves_other_slots_alone(forest, chains):
    tokens, parents = forest
    requests, rows = parents.shape
    # As vLLM's speculator has them: one in every so many rows of a buffer.
    slots, as_chain = torch.tensor([4, 9, 0, 9, 2, 9])[::2][:requests], torch.zeros(6, dtype=torch.bool)
    as_chain[slots] = torch.tensor(chains[:requests])
    states = empty_state(6, rows), empty_state(6, rows)
    planted = [
        place(tokens, parents, slots, as_chain, rows - 1, *state)
        for place, state in zip((plant, plant_torch), states, strict=True)
    ]
    assert torch.equal(*planted)
    for of_kernel, of_twin in zip(*states, strict=True):
        assert torch.equal(of_kernel, of_twin)
    others = torch.ones(6, dtype=torch.bool).index_fill(0, slots, False)
    for now, then in zip(states[0], empty_state(6, rows), strict=True):
        assert torch.equal(now[others], then[others])
    depths, ancestors = topology_torch(states[0][0][slots], rows - 1)
    assert torch.equal(depths, states[0][1][slots])
    assert torch.equal(ancestors, states[0][2][slots])


@pytest.mark.parametrize("place", [plant, plant_torch])
@settings(max_examples=40)
@given(forest=forests())
def test_the_spine_follows_the_first_child(place, forest):
    tokens, parents = forest
    requests, rows = parents.shape
    state, as_chain = empty_state(4, rows), torch.ones(4, dtype=torch.bool)
    planted = place(tokens, parents, torch.arange(requests), as_chain, rows - 1, *state)
    for r, tree in enumerate(parents.tolist()):
        spine, row = [], 0
        while (child := next((i for i in range(row + 1, rows) if tree[i] == row), None)) is not None:
            spine.append(child)
            row = child
        dead = rows - 1 - len(spine)
        assert planted[r].tolist() == spine + [0] * dead
        assert state[0][r].tolist() == [0, *range(len(spine)), *[-1] * dead]


@pytest.mark.parametrize("place", [plant, plant_torch])
def test_padding_is_planted_where_nobody_looks(place):
    state = empty_state(3, 4)
    parents = torch.tensor([[0, 0, 1, 1], [0, 0, 0, 0]])
    tokens, as_chain = torch.ones(2, 3, dtype=torch.int64), torch.zeros(3, dtype=torch.bool)
    place(tokens, parents, torch.tensor([0, -1]), as_chain, 3, *state)
    assert state[0].tolist() == [[0, 0, 1, 1], [77] * 4, [0, 0, 0, 0]]
    assert state[2][1].all()


@settings(max_examples=80)
@given(forests(), SEEDS, st.integers(0, 24))
def test_the_walk_equals_the_twin(forest, seed, num_nodes):
    tokens, parents = forest
    requests, rows = parents.shape
    generator = torch.Generator().manual_seed(seed)
    # Every row is right about one of its children, if it has some.
    is_child = parents[:, None, 1:] == torch.arange(rows)[:, None]
    draws = torch.rand(is_child.shape, generator=generator) * is_child
    chosen = (draws.argmax(-1) + 1).where(is_child.any(-1), 0)
    chosen[torch.rand(chosen.shape, generator=generator) < 0.1] = 99
    depths, ancestors = topology_torch(parents, rows - 1)
    nodes = torch.full((requests,), num_nodes)
    arguments = tokens, parents, ancestors, depths, chosen, nodes, rows - 1
    for of_kernel, of_twin in zip(accept_walk(*arguments), accept_walk_torch(*arguments), strict=True):
        assert torch.equal(of_kernel, of_twin)


def test_the_kernels_hold_at_the_default_sizes():
    generator = torch.Generator().manual_seed(0)
    supertree = random_supertree(generator, 2, [12] * 15)
    tokens, parents, _ = kept = best_rows(*supertree, 64, -0.2)
    assert all(torch.equal(a, b) for a, b in zip(kept, best_rows_torch(*supertree, 64, -0.2), strict=True))
    states, as_chain = (empty_state(3, 65), empty_state(3, 65)), torch.tensor([False, True, False])
    for place, state in zip((plant, plant_torch), states, strict=True):
        place(tokens, parents, torch.tensor([0, 1]), as_chain, 15, *state)
    assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))


@st.composite
def steps(draw):
    """Trees by slot and the rows of a step: some cut, some behind the rest of a prompt, some in their prefill."""
    _, parents = draw(forests(max_rows=20))
    requests, max_rows = parents.shape
    num_rows = [draw(st.integers(1, max_rows)) for _ in range(requests)]
    gaps = [draw(st.integers(0, 3)) for _ in range(requests)]
    tokens, end = [], 0
    for rows, gap in zip(num_rows, gaps, strict=True):
        tokens += range(end + gap, end + gap + rows)
        end += gap + rows
    bounds = torch.tensor([0, *torch.tensor(num_rows).cumsum(0).tolist()])
    starts = [draw(st.integers(0, 50)) for _ in range(requests)]
    positions = torch.cat([start + torch.arange(g + n) for start, g, n in zip(starts, gaps, num_rows, strict=True)])
    prefill_len = torch.tensor([draw(st.sampled_from([0, 30, 99])) for _ in range(6)], dtype=torch.int32)
    slots = torch.tensor([4, 0, 2], dtype=torch.int32)[:requests]
    return parents, torch.tensor(tokens), bounds, slots, prefill_len, positions


@settings(max_examples=60)
@given(steps(), SEEDS)
def test_rows_begin_and_end_a_step_as_the_twins_say(step, seed):
    parents, tokens, bounds, slots, prefill_len, sequential = step
    requests, max_rows = parents.shape
    depths, ancestors = topology_torch(parents, max_rows - 1)
    state = empty_state(6, max_rows)
    for everywhere, here in zip(state, (parents, depths, ancestors), strict=True):
        everywhere[slots.long()] = here
    moved = sequential.clone(), sequential.clone()
    actual, expected = (
        begin(positions, tokens, bounds, slots, prefill_len, *state)
        for begin, positions in zip((begin_rows, begin_rows_torch), moved, strict=True)
    )
    for name, of_kernel, of_twin in zip(Rows._fields, actual, expected, strict=True):
        assert torch.equal(of_kernel, of_twin), name
    assert torch.equal(*moved)
    # Some rows of a request in ascending order, its first among them, as a path has them.
    draws = torch.rand(requests, max_rows, generator=torch.Generator().manual_seed(seed))
    draws[:, 0] = 1
    picked = (draws > 0.5) & (torch.arange(max_rows) <= expected.num_nodes[:, None])
    path = torch.arange(max_rows).where(picked, max_rows).sort(1).values
    path = path.where(path < max_rows, -1)[:, : max(1, max_rows // 2)].contiguous()
    found = [
        locate(path, tokens, bounds, expected.roots, positions, len(sequential))
        for locate, positions in zip((path_tokens, path_tokens_torch), moved, strict=True)
    ]
    for of_kernel, of_twin in zip(*found, strict=True):
        assert torch.equal(of_kernel, of_twin)
    assert torch.equal(moved[0], sequential)
    assert torch.equal(moved[1], sequential)
    order = list(range(len(sequential)))
    for first, rows in zip(bounds[:-1].tolist(), path.tolist(), strict=True):
        for depth, row in enumerate(rows):
            if row >= 0:
                order[tokens[first + depth]] = int(tokens[first + row])
    assert found[0][2].tolist() == order
