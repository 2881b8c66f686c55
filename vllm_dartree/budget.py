"""``"tree_budget": "auto"``: how many nodes a batch of some size should verify, learned while serving.

Rows are nearly free while a batch is small and cost their share once it is large, so larger batches want smaller trees.
A tree cut to ``b`` nodes is the best tree of ``b`` nodes, so that only the scheduler needs to know. It gives the counts
and the times that it has anyway; nothing here waits for a device.
"""

import logging
import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

logger = logging.getLogger("vllm.dartree")

# A switch must promise this much more throughput; noise promises less.
HYSTERESIS = 1.05
# A batch size that was not seen before tries the budgets for some steps each, from none upwards, until one is so much
# worse than the best: rows only get dearer from there. Later it tries a neighbouring one, ever more rarely.
TRIAL_STEPS, HOPELESS, FIRST_TRIAL_AFTER, LAST_TRIAL_AFTER = 3, 0.7, 128, 4096
# How many observations a running mean remembers.
STEPS_REMEMBERED, ROUNDS_REMEMBERED = 16, 1024
# Rounds that a budget's tau must have to weigh as much as what the tau of the largest lets expect.
ROUNDS_OF_PRIOR = 64
# The tau of the largest budget before its first round; hopeful, since what is not tried is not learned.
FIRST_TAU = 8.0
# Share of a step's tokens that may belong to prefills, for its time to say something about trees.
PREFILL_SHARE = 0.25


def budget_ladder(budget: int) -> tuple[int, ...]:
    """Budgets to choose from, falling: ``budget``, its quarters down to 4 nodes, and none.

    Few, since each one wants CUDA graphs of its own.
    """
    ladder = [budget]
    while ladder[-1] >= 16:
        ladder.append(ladder[-1] // 4)
    return (*ladder, 0)


def batch_size_schedule(budget: int) -> list[tuple[int, int, int]]:
    """vLLM's ``num_speculative_tokens_per_batch_size`` with all budgets of the ladder in it: vLLM captures CUDA graphs
    for these, as far as ``max_num_seqs`` reaches, whatever batch size they stand at."""
    return [(size, size, nodes) for size, nodes in enumerate(budget_ladder(budget), start=1)]


@dataclass
class _Mean:
    value: float = 0.0
    count: int = 0

    def observe(self, value: float, remembered: int) -> None:
        self.count = min(self.count + 1, remembered)
        self.value += (value - self.value) / self.count

    def observe_seconds(self, seconds: float) -> None:
        """One late step (a graph that is new, another process) must not look like a price."""
        if 0 < self.count < TRIAL_STEPS:
            self.count += 1
            self.value = min(self.value, seconds)
        else:
            self.observe(min(seconds, 2 * self.value) if self.count else seconds, STEPS_REMEMBERED)


@dataclass
class _BatchSize:
    """What is known of batches of about this size."""

    budget: int
    steps: int = 0  # since the last switch
    next_trial: int = FIRST_TRIAL_AFTER  # the step at which a neighbouring budget is tried
    upwards: bool = True  # which neighbour that is
    trials: dict[int, int] = field(default_factory=dict)  # by budget, how often it was chosen to get to know it


class BudgetController:
    """Chooses the budget of each step, and is told how the steps went.

    Args:
        budget: the largest, ``num_speculative_tokens``.
        clock: seconds, ``time.perf_counter``.
    """

    def __init__(self, budget: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.ladder = budget_ladder(budget)
        self.clock = clock
        self.taus = {nodes: _Mean() for nodes in self.ladder if nodes}
        self.seconds: dict[tuple[int, int], _Mean] = {}  # the cost table: by batch size and budget
        self.batch_sizes: dict[int, _BatchSize] = {}
        self.taus[self.ladder[0]].value = FIRST_TAU
        self._chosen = self.ladder[0]
        self._running: tuple[int, int, float] | None = None  # the step in flight: size, budget, start

    def __getitem__(self, num_requests: int) -> int:
        """The budget of the trees that a step grows for the next one. vLLM's scheduler looks it up once a step, where a
        fixed schedule is a list."""
        self._chosen = self._choose(num_requests)
        return self._chosen

    def _choose(self, num_requests: int) -> int:
        size = self._size(num_requests)
        known = self.batch_sizes.get(size)
        if known is None:
            known = self.batch_sizes[size] = _BatchSize(self._budget_of_nearest(size))
        known.steps += 1
        promised = 0.0
        for nodes in reversed(self.ladder):
            if known.trials.setdefault(nodes, 0) < TRIAL_STEPS:
                known.trials[nodes] += 1
                return nodes
            promised = max(promised, self.throughput(size, nodes))
            if 0 < self.throughput(size, nodes) < HOPELESS * promised:
                break
        if known.steps >= known.next_trial:
            return self._try_neighbour(known)
        best = max(self.ladder, key=lambda nodes: self.throughput(size, nodes))
        if self.throughput(size, best) > HYSTERESIS * self.throughput(size, known.budget):
            logger.info(
                "DARTree: batches of about %d requests verify %d nodes a request, not %d; tau %.2f, %.2f ms a step",
                num_requests,
                best,
                known.budget,
                self.tau(best),
                1000 * self.seconds[size, best].value,
            )
            known.budget, known.steps, known.next_trial = best, 0, FIRST_TRIAL_AFTER
        return known.budget

    def throughput(self, size: int, nodes: int) -> float:
        """Tokens per second and request that a budget promises at a batch size; 0 if it was not tried there."""
        seconds = self.seconds.get((size, nodes))
        return self.tau(nodes) / seconds.value if seconds else 0.0

    def tau(self, nodes: int) -> float:
        """Tokens per round that a budget promises.

        It rises about with the logarithm of the budget, from 1 without nodes; so the tau of the largest says what to
        expect of one that had few rounds yet.
        """
        if not nodes:
            return 1.0
        largest, own = self.taus[self.ladder[0]], self.taus[nodes]
        prior = 1 + max(largest.value - 1, 0) * math.log2(nodes + 1) / math.log2(self.ladder[0] + 1)
        return (own.value * own.count + prior * ROUNDS_OF_PRIOR) / (own.count + ROUNDS_OF_PRIOR)

    def observe_round(self, num_nodes: int, num_accepted: int) -> None:
        """A request's tree of ``num_nodes`` was verified."""
        if num_nodes in self.taus:
            self.taus[num_nodes].observe(1 + num_accepted, ROUNDS_REMEMBERED)

    def begin_step(self, tokens_of_requests: Collection[int]) -> None:
        """A step was scheduled with so many tokens of each request, which ends the step before."""
        now = self.clock()
        if self._running is not None:
            size, nodes, start = self._running
            self.seconds.setdefault((size, nodes), _Mean()).observe_seconds(now - start)
        self._running = None
        num_requests = len(tokens_of_requests)
        nodes = max((tokens for tokens in tokens_of_requests if tokens - 1 in self.ladder), default=0) - 1
        prefill = sum(tokens_of_requests) - num_requests * (nodes + 1)
        # A step that verifies nodes and drafts none, or the other way round, has the price of neither budget.
        is_typical = (nodes > 0) == (self._chosen > 0)
        if nodes >= 0 and is_typical and prefill <= PREFILL_SHARE * sum(tokens_of_requests):
            self._running = (self._size(num_requests), nodes, now)

    def pause(self) -> None:
        """The engine had nothing to do; the time until the next step is no step's."""
        self._running = None

    @staticmethod
    def _size(num_requests: int) -> int:
        """Small batches each by themselves, larger ones a quarter octave together."""
        return num_requests if num_requests <= 8 else 8 + math.ceil(4 * math.log2(num_requests / 8))

    def _budget_of_nearest(self, size: int) -> int:
        nearest = min(self.batch_sizes, key=lambda other: abs(other - size), default=None)
        return self.ladder[0] if nearest is None else self.batch_sizes[nearest].budget

    def _try_neighbour(self, known: _BatchSize) -> int:
        """The budget above or below the one in use, for the steps of a trial."""
        place = self.ladder.index(known.budget) + (-1 if known.upwards else 1)
        if known.steps >= known.next_trial + TRIAL_STEPS - 1:
            known.next_trial = known.steps + min(known.next_trial, LAST_TRIAL_AFTER)
            known.upwards = not known.upwards
        return self.ladder[min(max(place, 0), len(self.ladder) - 1)]
