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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone that is not installed
sys.path.insert(0, str(Path(__file__).resolve().parent))

from tree_round import Round, Sizes, captured, fastest, measured_bandwidth, random_head, with_kernels

from vllm_dartree.engine.kv_layout import PagedLayout
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
from vllm_dartree.tree import TreeConfig

KERNEL_MODULES = (accept_walk, best_rows, domino_step, kv_move, plant, verify_rows)


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


def measured_rate(head: DominoHead, rows: int) -> float:
    """Operations per second of the product with the head's largest weight, for as many rows as a depth has."""
    weight = head.input_weight
    inputs = weight.new_ones(rows, weight.shape[1])
    best = fastest({"product": lambda: torch.mm(inputs, weight.mT)}, 5, weight.device)["product"]
    return 2 * rows * weight.numel() / best * 1e3


def measured_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of a large product, in float32 where that is faster than ``dtype`` (on some CPUs)."""
    size = 2048 if device.type == "cpu" else 8192
    factors = {str(kind): torch.ones(size, size, device=device, dtype=kind) for kind in {dtype, torch.float32}}
    times = fastest({name: lambda one=one: one @ one for name, one in factors.items()}, 3, device)
    return 2 * size**3 / min(times.values()) * 1e3


def measure(
    head: DominoHead, sizes: Sizes, num_requests: int, options: argparse.Namespace, bandwidth: float, peak: float
) -> dict:
    """One row of the table.

    ``ratio_ceiling`` is the ratio if all operations of the products, and nothing else, ran at ``peak``.
    """
    round_ = Round(head, sizes, num_requests)
    device = round_.hidden.device
    on_gpu = device.type == "cuda"
    heap_requests = min(num_requests, options.heap_requests)
    times = fastest(round_.stages, options.repeats, device)
    accepted = round_.step.accepted.num_accepted.float().mean().item()
    compared = {"heap": lambda: round_.heap(heap_requests), "eager": round_.grow}
    if on_gpu:
        compared["eager"] = with_kernels("torch", round_.grow)
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
        "ratio_ceiling": against["heap"] / (round_.operations_of_products() / peak * 1e3),
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


def table(rows: list[dict], bandwidth: float, peak: float) -> str:
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
        f"{'growth, ms':<13}{'heap':>10}{'eager':>10}{'fused':>10}{'ratio':>8}"
        f"{'bytes':>10}{'products':>10}{'ceiling':>9}"
        "   (bytes, products: floors)"
    )
    for row in rows:
        fused = f"{row['fused_ms']:>10.2f}" if row["fused_ms"] else f"{'-':>10}"
        lines.append(
            f"R = {row['requests']:<9}{row['heap_ms']:>10.1f}{row['eager_ms']:>10.1f}{fused}"
            f"{row['ratio_vs_sequential_heap']:>7.1f}x{row['growth_floor_ms']:>10.2f}{row['product_floor_ms']:>10.2f}"
            f"{row['ratio_ceiling']:>8.1f}x"
        )
    for row in rows:
        if row["graph_ms"]:
            lines.append(f"propose as a CUDA graph, R = {row['requests']}: {row['graph_ms']:.3f} ms")
    lines.append(f"measured in this run: {bandwidth / 1e9:.1f} GB/s, {peak / 1e9:.0f} GFLOP/s at most")
    return "\n".join(lines)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=inspect.getdoc(sys.modules[__name__]).splitlines()[0])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--dtype", choices=("bfloat16", "float32", "float16"), default="bfloat16")
    parser.add_argument("--repeats", type=int, default=5, help="the fastest of as many is taken")
    parser.add_argument("--heap-requests", type=int, default=16, help="of more, the heap's time is extrapolated")
    parser.add_argument(
        "--threads", type=int, help="of a CPU; one is timed by its own clock, which neighbours do not move"
    )
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    for name in ("hidden", "state", "emb", "vocabulary", "slots", "layers"):
        parser.add_argument(f"--{name}", type=int, default=getattr(Sizes, name))
    parser.add_argument("--budget", type=int, default=TreeConfig.budget)
    parser.add_argument("--width", type=int, default=TreeConfig.width)
    parser.add_argument("--candidates", type=int, default=TreeConfig.candidates)
    options = parser.parse_args(arguments)
    for name, value in vars(options).items():
        if any(number < 1 for number in (value if isinstance(value, list) else [value]) if isinstance(number, int)):
            parser.error(f"--{name.replace('_', '-')} is {value}, but it must be at least 1")
    return options


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
    peak = measured_peak(device, dtype)
    rows = [measure(head, sizes, requests, options, bandwidth, peak) for requests in options.requests]
    machine = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{machine}, {options.dtype}, torch {torch.__version__}")
    if device.type == "cpu" and options.dtype == "bfloat16":
        print(bf16_of_this_cpu())
    print(table(rows, bandwidth, peak))
    if options.json:
        figures = {
            "device": machine,
            "dtype": options.dtype,
            "bandwidth_bytes_per_s": bandwidth,
            "peak_operations_per_s": peak,
            "rows": rows,
        }
        options.json.write_text(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
