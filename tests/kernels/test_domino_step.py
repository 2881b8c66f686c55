"""One depth of the expansion: the kernels against their twins, the expansion with kernels against that without."""

import pytest
import torch
from drafts import random_head
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_dartree.kernels.domino_step import best_children, best_children_torch, gru_step, gru_step_torch
from vllm_dartree.tree import TreeConfig, draft_block, expand, prune

EXTREMES = (0.0, -0.0, float("-inf"), float("inf"), float("nan"), 3e38)


def whole_numbers(*shape: int, generator: torch.Generator) -> torch.Tensor:
    """So that dot products do not depend on the order of summation, and ties are many."""
    return torch.randint(-1, 2, shape, generator=generator).float()


@settings(max_examples=40)
@given(data=st.data())
def test_best_children_equal_those_of_the_twin_down_to_ties(data):
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    requests, branches, candidates = (data.draw(st.integers(1, n)) for n in (3, 20, 20))
    emb, vocab = data.draw(st.sampled_from([2, 64, 70])), 25
    width = data.draw(st.integers(1, min(branches * candidates, 24)))
    hidden = whole_numbers(requests, emb, generator=generator)
    state = whole_numbers(requests, branches, emb + 5, generator=generator)
    # Few channels matter, so that the biases are small numbers; the SiLU of a whole number is none.
    weight = whole_numbers(vocab, emb, generator=generator) * (torch.arange(emb) == emb - 1)
    ids = torch.rand(requests, 2, vocab, generator=generator).argsort(-1)[:, 0, :candidates]
    base = whole_numbers(requests * candidates, generator=generator)
    scores = -whole_numbers(requests, branches, generator=generator).abs()
    for place in data.draw(st.lists(st.integers(0, base.numel() - 1), max_size=4)):
        base[place] = data.draw(st.sampled_from(EXTREMES))
    base = base.view(requests, candidates)
    scores[torch.rand(scores.shape, generator=generator) < 0.1] = float("-inf")
    arguments = hidden, state[..., 2 : 2 + emb], weight, ids, base, scores, width, data.draw(st.booleans())
    actual, expected = best_children(*arguments), best_children_torch(*arguments)
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-6, atol=1e-5)
    # Where the order of two near-ties is a matter of the last bit, the scores alone are comparable.
    nearest = expected[0].diff(dim=1).abs().nan_to_num(1.0)
    if not ((nearest > 0) & (nearest < 1e-4)).any():
        assert torch.equal(actual[3], ids.gather(1, actual[2]))
        untied = torch.cat([nearest > 0, torch.ones(requests, 1, dtype=torch.bool)], 1)
        untied &= torch.cat([torch.ones(requests, 1, dtype=torch.bool), nearest > 0], 1)
        assert torch.equal(actual[1][untied], expected[1][untied])
        assert torch.equal(actual[2][untied], expected[2][untied])


@pytest.mark.parametrize("kernel", [best_children, best_children_torch])
def test_ties_keep_the_order_of_branches_and_candidates(kernel):
    """Equal logits of two branches with equal scores: log-softmax gives equal bits within and across them."""
    base = torch.tensor([[1.0, 2.0, 1.0, 2.0]])
    scores = torch.tensor([[-1.0, -1.0, float("-inf")]])
    nothing = torch.zeros(1, 3, 2)
    ids = torch.tensor([[9, 7, 8, 6]])
    _, branch, choice, tokens = kernel(nothing[:, 0], nothing, torch.zeros(10, 2), ids, base, scores, 10, True)
    assert branch.tolist() == [[0, 0, 1, 1, 0, 0, 1, 1, 2, 2]]
    assert choice.tolist() == [[1, 3, 1, 3, 0, 2, 0, 2, 0, 1]]
    assert tokens.tolist() == [[7, 6, 7, 6, 9, 8, 9, 8, 9, 7]]


@pytest.mark.parametrize("kernel", [best_children, best_children_torch])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_branch_without_numbers_is_impossible_and_spoils_no_other(kernel, value):
    base = torch.tensor([[0.0, 0.0], [value, 0.0]])
    nothing, ids = torch.zeros(2, 1, 2), torch.tensor([[3, 4], [5, 6]])
    best, *_, tokens = kernel(nothing[:, 0], nothing, torch.zeros(10, 2), ids, base, torch.zeros(2, 1), 2, False)
    assert torch.equal(best[1], torch.tensor([float("-inf")] * 2))
    assert tokens.tolist() == [[3, 4], [5, 6]]
    torch.testing.assert_close(best[0].exp(), torch.tensor([0.5, 0.5]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gru_step_equals_its_twin_and_torchs_cell(dtype):
    torch.manual_seed(0)
    size, emb = 70, 3
    states = torch.randn(2, 5, size + emb + 3 * size, dtype=dtype)
    inputs, branch = torch.randn(2, 4, 3 * size, dtype=dtype), torch.randint(5, (2, 4))
    rows = torch.zeros(2, 2, 4, size + 9, dtype=dtype)
    gru_step(inputs, states, branch, rows[0, ..., :size])
    gru_step_torch(inputs, states, branch, rows[1, ..., :size])
    tolerance = 1e-5 if dtype == torch.float32 else 5e-3
    torch.testing.assert_close(rows[0], rows[1], rtol=tolerance, atol=tolerance)
    assert not rows[..., size:].any()
    if dtype == torch.float32:
        identity, parent = torch.eye(3 * size), states[1, branch[1, 2]]
        gates = parent[-3 * size :]
        # A cell whose products are those given: unit weights for the input, and a bias for the state's.
        cell = torch.gru_cell(
            inputs[1, 2:3], parent[None, :size], identity, torch.zeros(3 * size, size), torch.zeros(3 * size), gates
        )
        torch.testing.assert_close(rows[0, 1, 2, :size], cell[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variant", ["pruned", "fixed", "chain"])
@pytest.mark.parametrize("prefix", [0, 2])
def test_the_expansion_grows_the_same_tree_with_the_kernels(monkeypatch, variant, prefix):
    torch.manual_seed(1)
    config = TreeConfig(budget=20, width=5, candidates=9, variant=variant)
    head = random_head("domino", 40, 6, torch.randn, gru_hidden_dim=11, emb_dim=7, pure_draft_prefix_len=prefix)
    logits = torch.randn(3, 6, 40) * 3
    logits[1] = logits[1].round()
    logits[2, 3:] = float("nan")
    block = draft_block(torch.tensor([1, 2, 3]), torch.randn(3, 6, 6), logits, 9)
    expected = expand(head, block, config.widths(6))
    monkeypatch.setenv("DARTREE_KERNELS", "triton")
    actual = expand(head, block, config.widths(6))
    for name in ("tokens", "parents", "depths"):
        assert torch.equal(getattr(actual, name), getattr(expected, name))
    torch.testing.assert_close(actual.scores, expected.scores)
    assert prune(actual, config.budget, config.depth_bonus).parents.shape == (3, 21)
