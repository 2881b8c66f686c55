"""``"tree_budget": "auto"``: the controller by itself, and in a model of a GPU's costs."""

import pytest
from simulate_load import CONCURRENCY, simulate

from vllm_dartree.budget import BudgetController, batch_size_schedule, budget_ladder


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def served(
    controller: BudgetController, clock: Clock, steps: int, seconds, accepted, num_requests: int = 4
) -> list[int]:
    """The budgets of so many steps that take ``seconds(nodes)`` and accept ``accepted(nodes)`` tokens."""
    nodes, chosen = 0, []
    for _ in range(steps):
        following = controller[num_requests]
        controller.begin_step([nodes + 1] * num_requests)
        clock.now += seconds(nodes)
        if nodes:
            for _ in range(num_requests):
                controller.observe_round(nodes, accepted(nodes))
        chosen.append(following)
        nodes = following
    return chosen


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def controller(clock) -> BudgetController:
    return BudgetController(64, clock)


def test_the_ladder_quarters_the_budget_down_to_4_and_ends_with_none():
    assert budget_ladder(64) == (64, 16, 4, 0)
    assert budget_ladder(15) == (15, 0)
    assert budget_ladder(1) == (1, 0)
    assert batch_size_schedule(16) == [(1, 1, 16), (2, 2, 4), (3, 3, 0)]


def test_free_rows_take_the_largest_tree_and_dear_rows_none(clock):
    for price, wanted in ((0.0, 64), (1.0, 0)):
        controller = BudgetController(64, clock)
        chosen = served(controller, clock, 600, lambda nodes, price=price: 1 + price * nodes, lambda nodes: nodes**0.5)
        assert set(chosen[100:125]) == {wanted}


def test_it_learns_the_price_and_the_tau_of_the_moment(controller, clock):
    served(controller, clock, 300, lambda nodes: 1.0, lambda nodes: nodes**0.5)
    # The text became hard to draft: no node is ever accepted, and each costs a little.
    chosen = served(controller, clock, 6000, lambda nodes: 1 + nodes / 50, lambda nodes: 0)
    assert chosen[-40:].count(0) > 30


def test_noise_below_the_hysteresis_switches_nothing(controller, clock):
    chosen = served(controller, clock, 120, lambda nodes: 1.0, lambda nodes: 8 if nodes >= 32 else nodes // 4)
    settled = chosen[-1]
    again = served(controller, clock, 120, lambda nodes: 1.0 if nodes == settled else 0.97, lambda nodes: 8)
    assert again.count(settled) > 100


def test_most_steps_are_no_trials(controller, clock):
    chosen = served(controller, clock, 5000, lambda nodes: 1.0, lambda nodes: nodes**0.5)
    assert chosen.count(64) > 4900


def test_a_prefill_or_a_pause_is_no_price_of_a_tree(controller, clock):
    served(controller, clock, 100, lambda nodes: 1.0, lambda nodes: nodes**0.5)
    prices = {key: mean.value for key, mean in controller.seconds.items()}
    controller.begin_step([65, 65, 65, 65])
    clock.now += 1.0
    controller.begin_step([65, 65, 2000])
    clock.now += 50.0
    controller.begin_step([65, 65, 65, 65])
    controller.pause()
    clock.now += 50.0
    controller.begin_step([65, 65, 65, 65])
    assert {key: mean.value for key, mean in controller.seconds.items()} == pytest.approx(prices)


def test_a_new_batch_size_begins_at_the_budget_of_the_nearest(controller, clock):
    def accepted(nodes: int) -> int:
        return min(nodes, 16) // 4

    served(controller, clock, 300, lambda nodes: 1.0 + (nodes > 16), accepted, num_requests=4)
    served(controller, clock, 300, lambda nodes: 1.0 + nodes, accepted, num_requests=40)
    for few, many in ((4, 40), (5, 50)):
        controller[few], controller[many]
        sizes = [controller.batch_sizes[controller._size(number)] for number in (few, many)]
        assert [size.budget for size in sizes] == [16, 0]
    assert len(controller.batch_sizes) == 4


@pytest.mark.slow
def test_in_the_cost_model_it_is_never_below_the_fixed_budget_or_none():
    rows = simulate(steps=3000)
    assert [row["requests"] for row in rows] == list(CONCURRENCY)
    for row in rows:
        assert row["auto"] > 0.95 * max(row["none"], row["fixed"]), row
    budgets = [row["budget"] for row in rows]
    assert budgets == sorted(budgets, reverse=True)
    assert budgets[0] == 64 and budgets[-1] == 0
