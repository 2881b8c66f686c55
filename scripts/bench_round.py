"""What a round spends on trees: launches, bytes and time of every stage, against the floor and the sequential heap.

Random weights at the sizes of Qwen3-8B's Domino drafter; the target's and the drafter's own forward are not in it. On
a GPU times come from CUDA events and the fused stages also run as a CUDA graph; on a CPU they are wall clock, of the
eager stages alone, and the launches of the fused ones are counted with kernels that do nothing. Repeats of what is
compared are interleaved, and the fastest of each is taken: on a shared machine the others measure its neighbours.
"""

import argparse
import inspect
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone that is not installed
sys.path.insert(0, str(Path(__file__).resolve().parent))

from gpu_check import captured, random_head

from vllm_dartree.engine.commit import CachedLayer, commit_rows
from vllm_dartree.engine.kv_layout import PagedLayout
from vllm_dartree.engine.state import TreeState
from vllm_dartree.heads import DominoHead
from vllm_dartree.kernels import (
    KERNELS_VARIABLE,
    accept_walk,
    best_rows,
    domino_step,
    kv_move,
    plant,
    use_triton,
    verify_rows,
)
from vllm_dartree.tree import DraftBlock, TreeConfig, draft_block, expand, prune, walk
from vllm_dartree.tree.oracles import sequential_heap

KERNEL_MODULES = (accept_walk, best_rows, domino_step, kv_move, plant, verify_rows)
BLOCK_SIZE = 16


@dataclass(frozen=True)
class Sizes:
    """Of the drafter, the head, the tree and the target's cache; the defaults are Qwen3-8B's."""

    hidden: int = 4096
    state: int = 1024
    emb: int = 512
    vocabulary: int = 151936
    slots: int = 15
    layers: int = 36
    kv_heads: int = 8
    head_size: int = 128
    tree: TreeConfig = field(default_factory=TreeConfig)


class Round:
    """One round of ``R`` requests, stage by stage; each stage can be run any number of times."""

    def __init__(self, head: DominoHead, sizes: Sizes, num_requests: int) -> None:
        weight = head.output_weight
        device = weight.device
        self.head, self.sizes, self.num_requests = head, sizes, num_requests
        self.widths = sizes.tree.widths(sizes.slots)
        self.hidden = weight.new_empty(num_requests, sizes.slots, sizes.hidden).normal_()
        self.logits = weight.new_empty(num_requests, sizes.slots, sizes.vocabulary).normal_() * 4
        self.anchor = torch.randint(sizes.vocabulary, (num_requests,), device=device)
        rows = sizes.tree.budget + 1
        self.state = TreeState(num_requests, sizes.tree.budget, len(self.widths), device)
        self.slots = torch.arange(num_requests, device=device)
        # Verify rows alone, each request's behind a context of one block; block 0 is vLLM's null block.
        blocks = 1 + -(-rows // BLOCK_SIZE)
        place = torch.arange(BLOCK_SIZE, BLOCK_SIZE + rows, device=device)
        mapping = (1 + self.slots[:, None] * blocks) * BLOCK_SIZE + place
        shape = (1 + num_requests * blocks, sizes.kv_heads, BLOCK_SIZE, 2 * sizes.head_size)
        self.layers = [
            CachedLayer(str(index), SimpleNamespace(kv_cache=weight.new_zeros(shape)), PagedLayout(use_triton(device)))
            for index in range(sizes.layers)
        ]
        self.mappings = dict.fromkeys((layer.name for layer in self.layers), mapping.flatten())
        self.features = [weight.new_zeros(num_requests * rows, sizes.hidden) for _ in range(5)]
        self.batch = SimpleNamespace(
            num_reqs=num_requests,
            num_tokens=num_requests * rows,
            cu_num_logits=torch.arange(num_requests + 1, device=device) * rows,
            logits_indices=torch.arange(num_requests * rows, device=device),
            expanded_local_pos=torch.arange(rows, device=device).repeat(num_requests),
            idx_mapping=self.slots,
            positions=place.repeat(num_requests),
        )
        self.prefill_len = torch.zeros(num_requests, dtype=torch.int64, device=device)
        for stage in (self.select, self.expand, self.prune, self.plant, self.begin):
            stage()
        # The target follows every node's first child, so that a long path is accepted, and not a contiguous one.
        parents = self.step.parents
        self.chosen = torch.zeros_like(parents)
        self.chosen.scatter_(1, parents[:, 1:].clamp(min=0).flip(1), self.tokens.flip(1))
        self.accept()

    def select(self) -> DraftBlock:
        self.block = draft_block(self.anchor, self.hidden, self.logits, self.sizes.tree.candidates)
        return self.block

    def expand(self) -> None:
        self.supertree = expand(self.head, self.block, self.widths)

    def prune(self) -> None:
        self.tree = prune(self.supertree, self.sizes.tree.budget, self.sizes.tree.depth_bonus)

    def plant(self) -> None:
        self.tokens = self.state.write(self.slots, self.tree)

    def begin(self) -> None:
        self.step = self.state.begin_step(self.batch, self.prefill_len)

    def accept(self) -> None:
        step, depth = self.step, self.state.max_depth
        step.accepted = walk(self.tokens, step.parents, step.topology, self.chosen, depth, step.num_nodes)

    def commit(self) -> None:
        commit_rows(self.step, self.layers, self.mappings, self.batch.positions, self.features)

    @property
    def stages(self) -> dict[str, Callable[[], object]]:
        names = ("select", "expand", "prune", "plant", "begin", "accept", "commit")
        return {name: getattr(self, name) for name in names}

    def grow(self) -> None:
        """What stands against the sequential heap: from candidates to the tree."""
        self.expand()
        self.prune()

    def propose(self) -> None:
        """What vLLM's draft graph holds behind the drafter's forward."""
        self.select()
        self.grow()
        self.plant()

    def heap(self, num_requests: int) -> None:
        """The tree of each request by best-first search, one call of the head per node."""
        block = self.block
        for request in range(num_requests):
            one = DraftBlock(
                *(part[request : request + 1] for part in (block.anchor, block.hidden, block.candidates, block.base))
            )
            sequential_heap(self.head, one, self.sizes.tree.budget, self.sizes.tree.depth_bonus)

    def bytes_of_stages(self) -> dict[str, int]:
        """What must move: weights once for every depth that waits for the one before, all else once.

        A cache that holds the head's weights from one depth to the next moves less.
        """
        sizes, requests, item = self.sizes, self.num_requests, self.hidden.element_size()
        nodes, rows, depth = sum(self.widths), sizes.tree.budget + 1, len(self.widths)
        per_step = (3 * sizes.state * sizes.hidden + (3 * sizes.state + sizes.emb) * sizes.state) * item
        once = sizes.emb * sizes.hidden * item
        embeddings = (nodes - self.widths[-1] + 1) * sizes.hidden * item
        candidates = depth * sizes.tree.candidates * (sizes.emb * item + 12)
        moved = int(self.step.accepted.num_accepted.sum())
        slot = sizes.layers * sizes.kv_heads * 2 * sizes.head_size * item
        return {
            "select": requests * sizes.slots * sizes.vocabulary * item,
            "expand": depth * per_step
            + once
            + requests * (embeddings + candidates + sizes.slots * sizes.hidden * item + nodes * 20),
            "prune": requests * (nodes * 20 + rows * 20),
            "plant": requests * rows * (rows + 40),
            "begin": requests * rows * (2 * rows + 48),
            "accept": requests * rows * (rows + 32),
            "commit": 2 * moved * slot + 2 * len(self.features) * requests * rows * sizes.hidden * item,
        }

    def operations_of_products(self) -> int:
        """Multiplications and additions of the head's matrix products."""
        sizes = self.sizes
        rows = 1 + sum(self.widths[:-1])
        per_row = 3 * sizes.state * sizes.hidden + (3 * sizes.state + sizes.emb) * sizes.state
        scored = (1 + sum(self.widths[:-1])) * sizes.tree.candidates * sizes.emb
        return 2 * self.num_requests * (rows * per_row + scored + sizes.slots * sizes.emb * sizes.hidden)


class _Launches(TorchDispatchMode):
    """Counts operations that launch something: all but views and fresh memory."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: torch._ops.OpOverload, types: object, args: tuple = (), kwargs=None) -> object:
        result = func(*args, **(kwargs or {}))
        if func.__name__.startswith(("empty", "new_empty")):
            # Kernels that do nothing leave it as it is, and some of it holds indices.
            return result.zero_()
        is_view = any(out.alias_info is not None and not out.alias_info.is_write for out in func._schema.returns)
        self.count += not (is_view or func.__name__.startswith(("_unsafe_view", "detach")))
        return result


@contextmanager
def counted_launches() -> Iterator[_Launches]:
    """Counts the launches of torch's operations and of the Triton kernels, which do nothing meanwhile."""
    launches = _Launches()

    class Counted:
        def __getitem__(self, grid: object) -> Callable[..., None]:
            def launch(*args: object, **options: object) -> None:
                launches.count += 1

            return launch

    kernels = [(module, name) for module in KERNEL_MODULES for name in vars(module) if name.endswith("_kernel")]
    patches = [mock.patch.object(module, name, Counted()) for module, name in kernels]
    for patch in patches:
        patch.start()
    try:
        with launches:
            yield launches
    finally:
        for patch in patches:
            patch.stop()


def count_launches(round_: Round, kernels: str) -> dict[str, int]:
    """Launches of every stage with the Triton kernels, or with their twins."""
    counts = {}
    with mock.patch.dict(os.environ, {KERNELS_VARIABLE: kernels}):
        for name, stage in round_.stages.items():
            for layer in round_.layers:
                layer.layout = PagedLayout(kernels == "triton")
            with counted_launches() as launches:
                stage()
            counts[name] = launches.count
    for stage in round_.stages.values():
        for layer in round_.layers:
            layer.layout = PagedLayout(use_triton(round_.hidden.device))
        stage()
    return counts


def count_kernels(function: Callable[[], object]) -> int:
    """Kernels that a call runs on the GPU, as the profiler sees them."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        function()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profiler.events())


def milliseconds(function: Callable[[], object], device: torch.device) -> float:
    """Of one call."""
    if device.type == "cpu":
        start = time.perf_counter()
        function()
        return (time.perf_counter() - start) * 1e3
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def fastest(functions: dict[str, Callable[[], object]], repeats: int, device: torch.device) -> dict[str, float]:
    """The least time of each, all run in turn, after a run of each to warm up."""
    for function in functions.values():
        function()
    times = [{name: milliseconds(f, device) for name, f in functions.items()} for _ in range(repeats)]
    return {name: min(run[name] for run in times) for name in functions}


def measured_bandwidth(device: torch.device) -> float:
    """Bytes per second of reading memory that no cache holds."""
    numbers = torch.ones((1 << 28) if device.type == "cpu" else (1 << 31), dtype=torch.uint8, device=device)
    numbers = numbers.view(torch.int64)
    best = fastest({"read": numbers.sum}, 10, device)["read"]
    return numbers.numel() * 8 / best * 1e3


def measured_rate(head: DominoHead, rows: int) -> float:
    """Operations per second of the product with the head's largest weight, for as many rows as a depth has."""
    weight = head.input_weight
    inputs = weight.new_ones(rows, weight.shape[1])
    best = fastest({"product": lambda: torch.mm(inputs, weight.mT)}, 5, weight.device)["product"]
    return 2 * rows * weight.numel() / best * 1e3


def measure(head: DominoHead, sizes: Sizes, num_requests: int, options: argparse.Namespace, bandwidth: float) -> dict:
    """One row of the table."""
    round_ = Round(head, sizes, num_requests)
    device = round_.hidden.device
    on_gpu = device.type == "cuda"
    heap_requests = min(num_requests, options.heap_requests)
    times = fastest(round_.stages, options.repeats, device)
    accepted = round_.step.accepted.num_accepted.float().mean().item()
    compared = {"heap": lambda: round_.heap(heap_requests), "eager": round_.grow}
    if on_gpu:
        compared["eager"] = _with_twins(round_.grow)
        compared["fused"] = round_.grow
        graph, _ = captured(round_.propose)
        compared["graph"] = graph.replay
    against = fastest(compared, options.repeats, device)
    against["heap"] *= num_requests / heap_requests
    num_bytes = round_.bytes_of_stages()
    rate = measured_rate(head, num_requests * max(round_.widths))
    best = against.get("fused", against["eager"])
    return {
        "requests": num_requests,
        "ratio_vs_sequential_heap": against["heap"] / best,
        "ratio_of_eager": against["heap"] / against["eager"],
        "heap_ms": against["heap"],
        "eager_ms": against["eager"],
        "fused_ms": against.get("fused"),
        "graph_ms": against.get("graph"),
        "stages_ms": times,
        "bytes": num_bytes,
        "floor_ms": sum(num_bytes.values()) / bandwidth * 1e3,
        "growth_floor_ms": (num_bytes["expand"] + num_bytes["prune"]) / bandwidth * 1e3,
        "product_floor_ms": round_.operations_of_products() / rate * 1e3,
        "product_operations_per_s": rate,
        "launches_eager": count_launches(round_, "torch"),
        "launches_fused": count_launches(round_, "triton"),
        "kernels_on_gpu": count_kernels(round_.propose) if on_gpu else None,
        "mean_accepted": accepted,
    }


def _with_twins(function: Callable[[], object]) -> Callable[[], object]:
    def run() -> None:
        with mock.patch.dict(os.environ, {KERNELS_VARIABLE: "torch"}):
            function()

    return run


def bf16_of_this_cpu() -> str:
    """Whether oneDNN has products in bf16 for this processor."""
    if torch.cpu._is_amx_tile_supported():
        return "bf16 products on AMX tiles"
    if torch.cpu._is_avx512_bf16_supported():
        return "bf16 products by AVX512_BF16"
    return (
        "no AVX512_BF16 and no AMX: oneDNN has no kernel for bf16 products here and widens both sides to float32 as it "
        "goes, so products of more than one row are bound by arithmetic and not by memory"
    )


def table(rows: list[dict], bandwidth: float) -> str:
    lines = []
    stages = list(rows[0]["stages_ms"])
    lines.append(f"{'ms per round':<13}" + "".join(f"{name:>9}" for name in stages) + f"{'all':>9}{'floor':>9}")
    for row in rows:
        times = row["stages_ms"]
        values = [*times.values(), sum(times.values()), row["floor_ms"]]
        lines.append(f"R = {row['requests']:<9}" + "".join(f"{value:>9.2f}" for value in values))
    lines.append("")
    for title, key in (("MB", "bytes"), ("launches, eager", "launches_eager"), ("launches, fused", "launches_fused")):
        values = rows[-1][key]
        shown = [value / 1e6 for value in values.values()] if key == "bytes" else list(values.values())
        form = ">9.1f" if key == "bytes" else ">9d"
        name = f"{title}, R = {rows[-1]['requests']}" if key == "bytes" else title
        lines.append(f"{name:<15}"[:15] + "".join(f"{value:{form}}" for value in [*shown, sum(shown)])[2:])
    lines.append("")
    lines.append(
        f"{'growth, ms':<13}{'heap':>10}{'eager':>10}{'fused':>10}{'ratio':>8}{'bytes':>10}{'products':>10}   "
        "(the last two: floors)"
    )
    for row in rows:
        fused = f"{row['fused_ms']:>10.2f}" if row["fused_ms"] else f"{'-':>10}"
        lines.append(
            f"R = {row['requests']:<9}{row['heap_ms']:>10.1f}{row['eager_ms']:>10.1f}{fused}"
            f"{row['ratio_vs_sequential_heap']:>7.1f}x{row['growth_floor_ms']:>10.2f}{row['product_floor_ms']:>10.2f}"
        )
    for row in rows:
        if row["graph_ms"]:
            lines.append(f"propose as a CUDA graph, R = {row['requests']}: {row['graph_ms']:.3f} ms")
    lines.append(f"bandwidth measured in this run: {bandwidth / 1e9:.1f} GB/s")
    return "\n".join(lines)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=inspect.getdoc(sys.modules[__name__]).splitlines()[0])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--dtype", choices=("bfloat16", "float32", "float16"), default="bfloat16")
    parser.add_argument("--repeats", type=int, default=5, help="the fastest of as many is taken")
    parser.add_argument("--heap-requests", type=int, default=16, help="of more, the heap's time is extrapolated")
    parser.add_argument("--threads", type=int, help="of a CPU; where neighbours are busy, one is measured best")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    for name in ("hidden", "state", "emb", "vocabulary", "slots", "layers"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Sizes, name))
    parser.add_argument("--budget", type=int, default=TreeConfig.budget)
    parser.add_argument("--width", type=int, default=TreeConfig.width)
    parser.add_argument("--candidates", type=int, default=TreeConfig.candidates)
    return parser.parse_args(arguments)


@torch.inference_mode()
def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tree = TreeConfig(budget=options.budget, width=options.width, candidates=options.candidates)
    names = ("hidden", "state", "emb", "vocabulary", "slots", "layers")
    sizes = Sizes(**{name: getattr(options, name) for name in names}, tree=tree)
    torch.manual_seed(0)
    if options.threads:
        torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    head = random_head(sizes.hidden, sizes.vocabulary, sizes.state, sizes.emb, sizes.slots, device, dtype)
    bandwidth = measured_bandwidth(device)
    rows = [measure(head, sizes, requests, options, bandwidth) for requests in options.requests]
    machine = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{machine}, {options.dtype}, torch {torch.__version__}")
    if device.type == "cpu" and options.dtype == "bfloat16":
        print(bf16_of_this_cpu())
    print(table(rows, bandwidth))
    if options.json:
        figures = {"device": machine, "dtype": options.dtype, "bandwidth_bytes_per_s": bandwidth, "rows": rows}
        options.json.write_text(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
