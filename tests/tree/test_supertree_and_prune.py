"""The claims of METHOD section 2 about the supertree and its pruning."""

import itertools
import math

import pytest
import torch
from drafts import HEADS, drafts, random_head
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_dartree.tree import TreeConfig, draft_block, expand, prune
from vllm_dartree.tree.oracles import best_first_heap, chain_tree, marginal_heap, sequential_heap

BONUSES = st.sampled_from([0.0, -0.2, -1.5])


@st.composite
def grown(draw):
    """A draft, widths that its candidates allow, and the supertree."""
    draft = draw(drafts())
    _, slots, candidates = draft.sizes
    widths, most = [], candidates
    for _ in range(draw(st.integers(1, slots))):
        widths.append(draw(st.integers(1, min(most, 12))))
        most = widths[-1] * candidates
    return draft, tuple(widths), expand(draft.head, draft.block, widths)


def rows_of(tree, r):
    """``(token, row of the parent)`` of the live nodes of one request, in row order."""
    pairs = zip(tree.tokens[r].tolist(), tree.parents[r, 1:].tolist(), strict=True)
    return [(token, parent) for token, parent in pairs if parent >= 0]


@settings(max_examples=2500)
@given(grown(), st.integers(1, 80), BONUSES)
def test_top_b_equals_best_first_heap(grown, budget, bonus):
    _, _, supertree = grown
    tree = prune(supertree, budget, bonus)
    for r in range(supertree.tokens.shape[0]):
        popped = best_first_heap(supertree, budget, bonus, r)
        row_of = {-1: 0} | {index: row for row, index in enumerate(popped, start=1)}
        tokens, parents = supertree.tokens[r].tolist(), supertree.parents[r].tolist()
        assert rows_of(tree, r) == [(tokens[i], row_of[parents[i]]) for i in popped]


@settings(max_examples=2000)
@given(grown(), st.integers(1, 80), BONUSES)
def test_every_prefix_is_a_tree_in_key_order_with_dead_nodes_last(grown, budget, bonus):
    _, widths, supertree = grown
    tree = prune(supertree, budget, bonus)
    requests = supertree.tokens.shape[0]
    assert tree.tokens.shape == tree.scores.shape == (requests, budget)
    assert tree.parents.shape == (requests, budget + 1)
    for r in range(requests):
        parents, scores = tree.parents[r].tolist(), tree.scores[r].tolist()
        alive = [parent >= 0 for parent in parents]
        assert parents[0] == 0 and alive == sorted(alive, reverse=True)
        depth, siblings, keys = [0], set(), []
        for row in range(1, sum(alive)):
            assert parents[row] < row, "a parent stands before its child, so any prefix is closed under parents"
            depth.append(depth[parents[row]] + 1)
            siblings.add((parents[row], int(tree.tokens[r, row - 1])))
            keys.append(torch.tensor(scores[row - 1]) + bonus * depth[row])
        assert keys == sorted(keys, reverse=True)
        assert len(siblings) == sum(alive) - 1, "siblings have distinct tokens"
        assert max(depth) <= len(widths)
        dead = [row for row in range(1, budget + 1) if not alive[row]]
        assert all(scores[row - 1] == float("-inf") and tree.tokens[r, row - 1] == 0 for row in dead)


@settings(max_examples=2000)
@given(grown(), st.integers(1, 40), BONUSES)
def test_a_batch_gives_each_request_its_own_tree(grown, budget, bonus):
    draft, widths, supertree = grown
    batched = prune(supertree, budget, bonus)
    for r in range(supertree.tokens.shape[0]):
        single = prune(expand(draft.head, draft.request(r), widths), budget, bonus)
        # The last bit of a score may depend on the place in the batch, which may swap near-ties.
        torch.testing.assert_close(single.scores[0], batched.scores[r], atol=1e-4, rtol=1e-4)
        if draft.exact:
            assert torch.equal(single.tokens[0], batched.tokens[r])
            assert torch.equal(single.parents[0], batched.parents[r])
            assert torch.equal(single.scores[0], batched.scores[r])


@settings(max_examples=600)
@given(drafts(max_slots=3, max_candidates=4, full_vocab=True))
def test_unlimited_width_equals_exhaustive_search(draft):
    requests, slots, candidates = draft.sizes
    widths = [candidates**depth for depth in range(1, slots + 1)]
    supertree = expand(draft.head, draft.block, widths)
    prepared = draft.head.prepare(draft.block)
    for r in range(requests):
        found = {}
        tokens, parents, scores = (x[r].tolist() for x in (supertree.tokens, supertree.parents, supertree.scores))
        for index, score in enumerate(scores):
            path, node = [], index
            while node >= 0:
                path.insert(0, tokens[node])
                node = parents[node]
            if score > float("-inf"):
                assert tuple(path) not in found
                found[tuple(path)] = score
        ids = draft.block.candidates[r].tolist()
        for depth in range(1, slots + 1):
            for choices in itertools.product(range(candidates), repeat=depth):
                # One path at a time through the head's three functions, without any batching over branches.
                state, expected = draft.head.root_state(prepared), 0.0
                for slot, choice in enumerate(choices):
                    logits = draft.block.base[:, slot, None] + draft.head.score(prepared, slot, state)
                    logits = logits.expand(requests, 1, candidates)
                    log_prob = logits[r, 0].double().log_softmax(-1)[choice].item()
                    expected += float("-inf") if math.isnan(log_prob) else log_prob
                    chosen = torch.full((requests, 1), choice)
                    state = draft.head.advance(prepared, slot, state.expand(requests, 1, *state.shape[2:]), chosen)
                path = tuple(ids[slot][choice] for slot, choice in enumerate(choices))
                if expected == float("-inf"):
                    assert path not in found
                else:
                    assert found.pop(path) == pytest.approx(expected, rel=1e-4, abs=1e-4)
        assert not found


@settings(max_examples=500)
@given(drafts(max_slots=3, max_candidates=4, full_vocab=True), st.integers(1, 20), BONUSES)
def test_unlimited_width_equals_the_sequential_heap(draft, budget, bonus):
    _, slots, candidates = draft.sizes
    widths = [candidates**depth for depth in range(1, slots + 1)]
    tree = prune(expand(draft.head, draft.block, widths), budget, bonus)
    for r in range(draft.sizes[0]):
        heap = sequential_heap(draft.head, draft.request(r), budget, bonus)
        live = tree.scores[r][tree.parents[r, 1:] >= 0]
        torch.testing.assert_close(live, heap.scores[0], atol=1e-4, rtol=1e-4)


@settings(max_examples=500)
@given(drafts(kinds=("marginal",), min_candidates=4, max_candidates=12, max_slots=5), st.integers(1, 12), st.data())
def test_width_equal_to_budget_expands_a_path_independent_head_exactly(draft, budget, data):
    _, slots, candidates = draft.sizes
    budget = min(budget, candidates)
    tree = prune(expand(draft.head, draft.block, (budget,) * slots), budget, 0.0)
    for r in range(draft.sizes[0]):
        log_probs = draft.block.base[r].log_softmax(-1)
        log_probs = log_probs.masked_fill(log_probs.isnan(), float("-inf"))
        heap = marginal_heap(draft.block.candidates[r], log_probs, budget)
        live = tree.scores[r][tree.parents[r, 1:] >= 0]
        torch.testing.assert_close(live, heap.scores[0], atol=1e-4, rtol=1e-4)


@settings(max_examples=500)
@given(drafts())
def test_width_one_is_the_corrected_chain(draft):
    _, slots, _ = draft.sizes
    tree = prune(expand(draft.head, draft.block, (1,) * slots), slots, -0.2)
    for r in range(draft.sizes[0]):
        chain = chain_tree(draft.head, draft.request(r))
        length = chain.tokens.shape[1]
        assert tree.parents[r, 1:].tolist() == [*range(length), *[-1] * (slots - length)]
        if draft.exact:
            assert torch.equal(tree.tokens[r, :length], chain.tokens[0])


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_cost_nodes_and_nothing_else(kind, poison):
    torch.manual_seed(0)
    head = random_head(kind, 9, 3, torch.randn)
    logits = torch.randn(2, 4, 9)
    hidden, anchor = torch.randn(2, 4, 3), torch.zeros(2, dtype=torch.int64)
    logits[1, 2, 3] = poison
    tree = prune(expand(head, draft_block(anchor, hidden, logits, 6), (4,) * 4), 16, -0.2)
    assert (tree.parents[0] >= 0).all(), "the other request keeps its nodes"
    assert not tree.scores.isnan().any()
    alive = tree.parents[1, 1:] >= 0
    assert 0 < alive.sum() <= 2 * 4, "the two slots before the poisoned one are alive, nothing behind them"


@settings(max_examples=300)
@given(drafts(max_candidates=12, min_candidates=12), st.integers(1, 70), st.sampled_from([0.0, -0.2]))
def test_fixed_variant_draws_exactly_the_budget(draft, budget, bonus):
    _, slots, candidates = draft.sizes
    budget = min(budget, candidates * slots)
    config = TreeConfig(budget=budget, candidates=candidates, variant="fixed", depth_bonus=bonus)
    widths = config.widths(slots)
    assert sum(widths) == budget and max(widths) - min(widths) <= 1
    tree = prune(expand(draft.head, draft.block, widths), budget, bonus)
    possible = torch.isfinite(draft.block.base).all() and torch.isfinite(tree.scores).all()
    assert (tree.parents >= 0).all() or not possible
