"""Knobs that cannot work are refused with their name, their value and what is allowed."""

import pytest
import torch
from drafts import random_head

from vllm_dartree.tree import TreeConfig, TreeConfigError, draft_block, expand, prune


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"depth_bonus": 0.1}, "depth_bonus is 0.1, but it must be a finite number <= 0"),
        ({"depth_bonus": float("nan")}, "depth_bonus is nan"),
        ({"depth_bonus": float("-inf")}, "depth_bonus is -inf"),
        ({"depth_bonus": -(10**400)}, "it must be a finite number <= 0"),
        ({"budget": 0}, "budget is 0, but it must be an integer >= 1"),
        ({"budget": 6.4}, "budget is 6.4, but it must be an integer >= 1"),
        ({"width": 0}, "width is 0, but it must be an integer >= 1"),
        ({"width": True}, "width is True, but it must be an integer >= 1"),
        ({"candidates": -3}, "candidates is -3, but it must be an integer >= 1"),
        ({"candidates": 4, "width": 5}, "width is 5 and candidates is 4"),
        ({"depth": 0}, "depth is 0, but it must be an integer >= 1"),
        ({"variant": "bushy"}, "variant is 'bushy'; it must be one of pruned, fixed, chain"),
    ],
)
def test_bad_knobs_are_refused(knobs, words):
    with pytest.raises(TreeConfigError) as error:
        TreeConfig(**knobs)
    assert words in str(error.value)


def test_depth_beyond_the_block_is_refused():
    with pytest.raises(TreeConfigError, match="depth is 16, but the drafter's block has 15 slots"):
        TreeConfig(depth=16).widths(15)


def test_fixed_variant_that_needs_more_children_than_candidates_is_refused():
    with pytest.raises(TreeConfigError, match="grows 9 children of the anchor, but candidates is 8"):
        TreeConfig(budget=63, width=1, candidates=8, variant="fixed").widths(7)


def test_widths_of_the_variants():
    assert TreeConfig().widths(15) == (12,) * 15
    assert TreeConfig(depth=4, width=3).widths(15) == (3,) * 4
    assert TreeConfig(variant="chain").widths(15) == (1,) * 15
    assert TreeConfig(variant="chain", budget=5).widths(15) == (1,) * 5
    assert TreeConfig(variant="fixed").widths(15) == (5, 5, 5, 5, *(4,) * 11)
    assert TreeConfig(variant="fixed", budget=3).widths(15) == (1, 1, 1)


def test_a_budget_larger_than_the_supertree_keeps_all_of_it_and_leaves_rows_dead():
    torch.manual_seed(0)
    block = draft_block(torch.tensor([1]), torch.randn(1, 3, 3), torch.randn(1, 3, 9), 6)
    tree = prune(expand(random_head("domino", 9, 3, torch.randn), block, (4, 4, 4)), 128, -0.2)
    assert tree.tokens.shape == (1, 128)
    assert (tree.parents[0, :13] >= 0).all() and (tree.parents[0, 13:] == -1).all()
