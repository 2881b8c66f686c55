"""Serves 1 to 512 requests at once in a model of a GPU's costs: no speculation, a fixed budget, the automatic one.

    python scripts/simulate_load.py [--steps 3000] [--plot load.png] [--json load.json]

The automatic budget is the controller that runs in vLLM's scheduler (``vllm_dartree/budget.py``). It is told what it
would be told there, the noisy time of each step and the accepted length of each round, and nothing of the model;
throughput counts its trials. The costs are those of a roofline with the sizes of Qwen3-8B in bf16 on an H200-like
device: they say where budgets cross, and are no measurement.
"""

import argparse
import json
import random
from dataclasses import dataclass
from pathlib import Path

from vllm_dartree.budget import BudgetController

BUDGET = 64
CONCURRENCY = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


@dataclass(frozen=True)
class CostModel:
    """Seconds of a step: bytes over bandwidth or operations over speed, whichever is more, and a constant."""

    bandwidth: float = 4.0e12  # bytes/s
    speed: float = 7.0e14  # operations/s that dense products reach
    target_bytes: float = 16.4e9
    target_operations: float = 16.4e9  # per row
    drafter_bytes: float = 3.5e9  # five layers, the LM head once more, the correction head
    drafter_operations: float = 3.5e9  # per row of the block
    block_rows: int = 16
    kv_bytes: float = 147456 * 1500  # per request and step, at 1500 tokens of context
    overhead: float = 0.5e-3
    tree: float = 0.4e-3  # expansion, pruning, walk, commit

    def seconds(self, num_requests: int, nodes: int, drafts: bool) -> float:
        """Of a step that verifies ``nodes`` nodes of each request and, if ``drafts``, grows the next trees."""

        def roofline(num_bytes: float, operations: float) -> float:
            return max(num_bytes / self.bandwidth, operations / self.speed)

        rows = num_requests * (nodes + 1)
        total = self.overhead + roofline(
            self.target_bytes + num_requests * self.kv_bytes, rows * self.target_operations
        )
        if drafts:
            rows = num_requests * self.block_rows
            total += self.tree + roofline(self.drafter_bytes, rows * self.drafter_operations)
        return total


DEPTH = 15


def accepted(random_: random.Random, nodes: int) -> int:
    """The accepted length of a round with so many nodes: tau is 2.4 at 4 nodes and 7.3 at 64."""
    length = 0
    while length < DEPTH and random_.random() < 0.9 * (1 - 0.55 * 2.0 ** (-nodes / (4 + 2 * length))):
        length += 1
    return min(length, nodes)


def serve(model: CostModel, num_requests: int, policy: object, steps: int, seed: int, controller=None) -> float:
    """Tokens per second. ``policy[num_requests]`` is the budget of the drafts of each step."""
    random_ = random.Random(seed)
    seconds, tokens, nodes = 0.0, 0, 0
    for _ in range(steps):
        next_nodes = policy[num_requests]
        if controller is not None:
            controller.now = seconds
            controller.begin_step([nodes + 1] * num_requests)
        step = model.seconds(num_requests, nodes, drafts=next_nodes > 0)
        seconds += step * random_.lognormvariate(0, 0.05) + (0.02 if random_.random() < 0.005 else 0)
        for _ in range(num_requests):
            length = accepted(random_, nodes) if nodes else 0
            tokens += 1 + length
            if nodes and controller is not None:
                controller.observe_round(nodes, length)
        nodes = next_nodes
    return tokens / seconds


class Constant:
    def __init__(self, nodes: int) -> None:
        self.nodes = nodes

    def __getitem__(self, num_requests: int) -> int:
        return self.nodes


class SimulatedController(BudgetController):
    """With the simulation's clock."""

    def __init__(self) -> None:
        self.now = 0.0
        super().__init__(BUDGET, clock=lambda: self.now)


def simulate(steps: int, seed: int = 0) -> list[dict[str, float]]:
    """A row for each concurrency, in tokens per second; each has a controller of its own.

    Args:
        steps: of the engine for up to 8 requests, and fewer for more, but at least half as many.
    """
    model, rows = CostModel(), []
    for num_requests in CONCURRENCY:
        few = max(steps * 8 // max(num_requests, 8), steps // 2)
        controller = SimulatedController()
        row = {
            "requests": num_requests,
            "none": serve(model, num_requests, Constant(0), few, seed),
            "fixed": serve(model, num_requests, Constant(BUDGET), few, seed),
            "auto": serve(model, num_requests, controller, few, seed, controller),
        }
        afterwards = [controller[num_requests] for _ in range(64)]  # a trial may be among them
        rows.append(row | {"budget": max(set(afterwards), key=afterwards.count)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3000, help="engine steps at each concurrency (default: 3000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, help="write a plot to this file (needs matplotlib)")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    arguments = parser.parse_args()
    if arguments.steps < 2:
        parser.error(f"--steps is {arguments.steps}, but it must be at least 2")
    rows = simulate(arguments.steps, arguments.seed)
    print(f"| concurrent requests | none, tok/s | fixed {BUDGET} | auto | auto settles at | auto / better of both |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        best = max(row["none"], row["fixed"])
        print(
            f"| {row['requests']} | {row['none']:.0f} | {row['fixed']:.0f} | {row['auto']:.0f} | {row['budget']} | "
            f"{row['auto'] / best:.2f} |"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": rows}, indent=1))
    if arguments.plot:
        plot(rows, arguments.plot)


def plot(rows: list[dict[str, float]], path: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for policy, label in (("none", "no speculation"), ("fixed", f"{BUDGET} nodes"), ("auto", "auto")):
        axes.plot([row["requests"] for row in rows], [row[policy] for row in rows], marker="o", label=label)
    axes.set(xscale="log", yscale="log", xlabel="concurrent requests", ylabel="tokens/s in the cost model")
    axes.set_xticks(CONCURRENCY, CONCURRENCY)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
