"""Checks every kernel on a GPU against its twin, and times what a round of Qwen3-8B would spend on trees.

It needs PyTorch and Triton and nothing else, takes a few minutes, and prints a short table last. It exits with 1 if a
check fails, and with 2 where there is no GPU.
"""

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone that is not installed

from vllm_dartree.heads.domino import DominoHead, DominoSpec
from vllm_dartree.kernels.kv_move import move_slots, move_slots_torch
from vllm_dartree.kernels.tree_attention import tree_attention, tree_attention_torch
from vllm_dartree.tree import DraftTree, Topology, TreeConfig, draft_block, expand, prune, topology

# What bf16 and fp16 round away of a weighted mean of numbers around 1; float32 is summed in another order only.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}


@dataclass
class Verify:
    """Verify rows of several requests over a paged cache; slots that no row sees are NaN."""

    query: Tensor  # [num_tokens, num_heads, D]
    kv_cache: Tensor  # [num_blocks, num_kv_heads, block_size, 2 * D]
    block_table: Tensor  # [R, max_blocks] int32
    first_tokens: Tensor  # [R] int64
    num_rows: Tensor  # [R] int64
    roots: Tensor  # [R] int64
    tree: Topology
    sliding_window: int | None = None

    @property
    def scale(self) -> float:
        return self.query.shape[-1] ** -0.5

    def attend(self, attention: Callable[..., None], out: Tensor, **options: object) -> Tensor:
        attention(
            self.query,
            *self.kv_cache.chunk(2, dim=-1),
            out,
            self.block_table,
            self.first_tokens,
            self.num_rows,
            self.roots,
            self.tree.ancestors,
            self.tree.depths,
            self.scale,
            self.sliding_window,
            **options,
        )
        return out

    def in_float32(self) -> "Verify":
        return Verify(**vars(self) | {"query": self.query.float(), "kv_cache": self.kv_cache.float()})

    def dense(self, request: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """A request's queries ``[1, num_heads, N, D]``, its keys and values ``[1, num_kv_heads, T, D]``, its mask."""
        rows, root = int(self.num_rows[request]), int(self.roots[request])
        first = int(self.first_tokens[request])
        content = self.kv_cache[self.block_table[request].long()].transpose(0, 1).flatten(1, 2)[:, : root + rows]
        keys, values = content[None].chunk(2, dim=-1)
        context = torch.ones(rows, root, dtype=torch.bool, device=keys.device)
        mask = torch.cat([context, self.tree.ancestors[request, :rows, :rows]], dim=1)
        return self.query[first : first + rows].transpose(0, 1)[None], keys.contiguous(), values.contiguous(), mask


def random_trees(num_requests: int, num_rows: int, device: str, seed: int = 0) -> Topology:
    """Every node hangs on some row before it."""
    generator = torch.Generator(device).manual_seed(seed)
    draws = torch.rand(num_requests, num_rows, generator=generator, device=device)
    return topology((draws * torch.arange(num_rows, device=device)).long())


def random_verify(
    roots: list[int],
    budget: int,
    device: str,
    dtype: torch.dtype,
    kv_heads: int = 8,
    groups: int = 4,
    head_size: int = 128,
    block_size: int = 16,
    sliding_window: int | None = None,
) -> Verify:
    """A tree of ``budget`` nodes behind each of the contexts; the first is cut to half, as the scheduler may do."""
    torch.manual_seed(len(roots))
    rows, num_requests = budget + 1, len(roots)
    num_rows = [rows] * num_requests
    num_rows[0] = rows // 2 + 1
    max_blocks = -(-(max(roots) + rows) // block_size)
    order = torch.randperm(num_requests * max_blocks, device=device) + 1  # block 0 is the null block
    block_table = order.view(num_requests, max_blocks)
    shape = (num_requests * max_blocks + 1, kv_heads, block_size, 2 * head_size)
    kv_cache = torch.randn(shape, device=device, dtype=dtype)
    position = torch.arange(max_blocks * block_size, device=device).view(max_blocks, block_size)
    for request, root in enumerate(roots):
        unseen = position >= root + num_rows[request]
        if sliding_window is not None:
            unseen |= position <= root - sliding_window
        kv_cache[block_table[request]] = kv_cache[block_table[request]].masked_fill(
            unseen[:, None, :, None], float("nan")
        )
    num_rows = torch.tensor(num_rows, device=device)
    return Verify(
        query=torch.randn(int(num_rows.sum()), kv_heads * groups, head_size, device=device, dtype=dtype),
        kv_cache=kv_cache,
        block_table=block_table.to(torch.int32),
        first_tokens=num_rows.cumsum(0) - num_rows,
        num_rows=num_rows,
        roots=torch.tensor(roots, device=device),
        tree=random_trees(num_requests, rows, device),
        sliding_window=sliding_window,
    )


def attention_error(verify: Verify, **options: object) -> float:
    """Largest difference between the kernel and its twin, which computes in float32 on the same numbers."""
    exact = verify.in_float32()
    expected = exact.attend(tree_attention_torch, torch.zeros_like(exact.query), soft_cap=options.get("soft_cap"))
    actual = verify.attend(tree_attention, torch.zeros_like(verify.query), **options)
    return (actual.float() - expected).abs().nan_to_num(float("inf")).max().item()


def sdpa_error(verify: Verify) -> float:
    """Largest difference between the kernel and ``scaled_dot_product_attention`` in float32."""
    attended = verify.attend(tree_attention, torch.zeros_like(verify.query))
    worst = 0.0
    for request, (first, rows) in enumerate(zip(verify.first_tokens.tolist(), verify.num_rows.tolist(), strict=True)):
        query, keys, values, mask = verify.dense(request)
        expected = F.scaled_dot_product_attention(
            query.float(), keys.float(), values.float(), attn_mask=mask, scale=verify.scale, enable_gqa=True
        )
        actual = attended[first : first + rows].transpose(0, 1)
        worst = max(worst, (actual.float() - expected[0]).abs().nan_to_num(float("inf")).max().item())
    return worst


def moves_as_its_twin(device: str, dtype: torch.dtype, num_requests: int, path: int, head_size: int = 128) -> bool:
    """Whether the move of overlapping paths leaves the same cache, over and over, since a race shows only sometimes."""
    torch.manual_seed(0)
    blocks, block_size = num_requests * 8, 16
    cache = torch.randn(blocks + 1, 8, block_size, 2 * head_size, device=device, dtype=dtype)
    base = torch.arange(num_requests, device=device)[:, None] * 8 * block_size + block_size
    for _ in range(20):
        row = torch.rand(num_requests, 8 * block_size, device=device).argsort(-1)[:, :path].sort(-1).values
        source, destination = base + row, base + torch.arange(path, device=device)
        destination[0, -1] = -1
        expected, moved = cache.clone(), cache.clone()
        move_slots_torch(expected, source, destination)
        move_slots(moved, source, destination)
        if not torch.equal(expected, moved):
            return False
    return True


@dataclass
class TreeStage:
    """What a round computes between the drafter's logits and the next verify, with a Domino head."""

    head: DominoHead
    anchor: Tensor  # [R] int64
    hidden: Tensor  # [R, L, H]
    logits: Tensor  # [R, L, V]
    config: TreeConfig

    def run(self) -> tuple[DraftTree, Topology]:
        widths = self.config.widths(self.hidden.shape[1])
        block = draft_block(self.anchor, self.hidden, self.logits, self.config.candidates)
        tree = prune(expand(self.head, block, widths), self.config.budget, self.config.depth_bonus)
        return tree, topology(tree.parents, len(widths))


def random_head(
    hidden: int, vocab: int, state: int, emb: int, num_slots: int, device: str, dtype: torch.dtype
) -> DominoHead:
    def weight(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype) * shape[-1] ** -0.5

    spec = DominoSpec(num_slots + 1, 0, (0,), gru_hidden_dim=state, emb_dim=emb)
    embedding = weight(vocab, hidden)
    tensors = {
        "prefix_gru.weight_ih_l0": weight(3 * state, hidden),
        "prefix_gru.weight_hh_l0": weight(3 * state, state),
        "embed_proj.0.weight": weight(emb, hidden + state),
        "embed_proj.2.weight": weight(vocab, emb),
    }
    return DominoHead(spec, tensors, lambda tokens: F.embedding(tokens, embedding))


def random_tree_stage(head: DominoHead, num_requests: int, num_slots: int, config: TreeConfig) -> TreeStage:
    weight = head.output_weight
    hidden = weight.new_empty(num_requests, num_slots, head.hidden_projection.shape[1]).normal_()
    logits = weight.new_empty(num_requests, num_slots, weight.shape[0]).normal_() * 4
    anchor = torch.randint(weight.shape[0], (num_requests,), device=weight.device)
    return TreeStage(head, anchor, hidden, logits, config)


def milliseconds(function: Callable[[], object], repeats: int = 30) -> float:
    """The median time of a call on the GPU."""
    for _ in range(5):
        function()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def captured(function: Callable[[], object]) -> tuple[torch.cuda.CUDAGraph, object]:
    """A CUDA graph of a call, and the call's result, which each replay writes again."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = function()
    return graph, result


def replay_follows_its_buffers() -> bool:
    """Whether a graph of the verify attention computes the trees that its buffers hold when it is replayed."""
    verify = random_verify([40, 1500, 300], 64, "cuda", torch.bfloat16)
    out = torch.zeros_like(verify.query)
    graph, _ = captured(lambda: verify.attend(tree_attention, out, num_splits=2))
    verify.roots.copy_(torch.tensor([7, 1024, 299]))
    verify.num_rows.copy_(torch.tensor([12, 65, 0]))  # the last request pads the batch
    fresh = random_trees(3, 65, "cuda", seed=1)
    verify.tree.ancestors.copy_(fresh.ancestors)
    verify.tree.depths.copy_(fresh.depths)
    out.zero_()
    graph.replay()
    return torch.equal(out, verify.attend(tree_attention, torch.zeros_like(out), num_splits=2))


@dataclass
class Report:
    """The lines of the table, and whether all checks passed."""

    lines: list[tuple[str, str]]
    passed: bool = True

    def check(self, name: str, passed: bool, value: str = "") -> None:
        self.passed &= passed
        self.lines.append((name, f"{'ok' if passed else 'FAILED'} {value}".strip()))

    def error(self, name: str, error: float, tolerance: float) -> None:
        self.check(name, error <= tolerance, f"(largest error {error:.1e})")

    def time(self, name: str, value: float, note: str = "") -> None:
        self.lines.append((name, f"{value:8.3f} ms {note}".rstrip()))

    def table(self) -> str:
        width = max(len(name) for name, _ in self.lines)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in self.lines)


def check_kernels(report: Report) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        tolerance = TOLERANCES[dtype]
        for head_size, groups in ((64, 7), (80, 1), (128, 4), (256, 2)):
            verify = random_verify([0, 17, 700], 64, "cuda", dtype, kv_heads=2, groups=groups, head_size=head_size)
            error = max(attention_error(verify, num_splits=splits) for splits in (1, 4))
            report.error(f"attention = twin, {name}, heads of {head_size}", error, tolerance)
        window = random_verify([5, 900], 64, "cuda", dtype, kv_heads=2, sliding_window=256)
        error = max(attention_error(window, num_splits=splits) for splits in (1, 2))
        report.error(f"attention = twin, {name}, sliding window", error, tolerance)
        capped = random_verify([5, 300], 64, "cuda", dtype, kv_heads=2)
        report.error(f"attention = twin, {name}, soft cap", attention_error(capped, soft_cap=5.0), tolerance)
        report.error(f"attention = SDPA, {name}", sdpa_error(random_verify([9, 2000], 64, "cuda", dtype)), tolerance)
        report.check(f"move of cache slots = twin, {name}", moves_as_its_twin("cuda", dtype, 64, 16))
    report.check("attention in a CUDA graph follows its buffers", replay_follows_its_buffers())


def time_attention(report: Report) -> None:
    """Against attention of the same rows over the same keys without a tree, and against SDPA with its mask."""
    for num_requests, context in ((1, 2048), (1, 32768), (16, 2048), (64, 2048)):
        verify = random_verify([context] * num_requests, 64, "cuda", torch.bfloat16)
        verify.num_rows.fill_(65)
        verify.first_tokens.copy_(torch.arange(num_requests) * 65)
        verify.query = torch.randn(num_requests * 65, 32, 128, device="cuda", dtype=torch.bfloat16)
        verify.kv_cache.nan_to_num_()
        out = torch.zeros_like(verify.query)
        name = f"{num_requests} x {context} context"
        tree = milliseconds(lambda verify=verify, out=out: verify.attend(tree_attention, out))
        dense = [verify.dense(request) for request in range(num_requests)]
        query, keys, values = (torch.cat(parts) for parts in list(zip(*dense, strict=True))[:3])
        mask = torch.stack([mask for *_, mask in dense])[:, None]

        def plain(mask: Tensor | None, query: Tensor = query, keys: Tensor = keys, values: Tensor = values) -> float:
            return milliseconds(
                lambda: F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)
            )

        report.time(f"verify attention, {name}", tree)
        report.time(f"SDPA without a mask, {name}", unmasked := plain(None), f"(tree: {tree / unmasked:.2f}x)")
        report.time(f"SDPA with the mask, {name}", masked := plain(mask), f"(tree: {tree / masked:.2f}x)")
    cache = torch.zeros(4096, 8, 16, 256, device="cuda", dtype=torch.bfloat16)
    for num_requests in (1, 64):
        source = torch.arange(num_requests * 16, device="cuda").view(-1, 16) * 2 + 16
        destination = source - 1
        report.time(
            f"move of 16 slots, {num_requests} requests, a layer",
            milliseconds(lambda source=source, destination=destination: move_slots(cache, source, destination)),
        )


def time_tree_stage(report: Report) -> None:
    """At the sizes of Qwen3-8B, with one random head."""
    config, num_slots = TreeConfig(), 15
    head = random_head(4096, 151936, 1024, 512, num_slots, "cuda", torch.bfloat16)
    for num_requests in (1, 4, 16):
        stage = random_tree_stage(head, num_requests, num_slots, config)
        report.time(f"tree stage, eager, {num_requests} requests", milliseconds(stage.run))
        graph, (tree, _) = captured(stage.run)
        report.time(f"tree stage, CUDA graph, {num_requests} requests", milliseconds(graph.replay))
        same = torch.equal(tree.tokens, stage.run()[0].tokens)
        report.check(f"tree stage, CUDA graph = eager, {num_requests} requests", same)


def main() -> int:
    if not torch.cuda.is_available():
        print("gpu_check needs a GPU, and PyTorch finds none here.", file=sys.stderr)
        return 2
    report = Report([("device", torch.cuda.get_device_name()), ("torch", torch.__version__)])
    with torch.inference_mode():
        for part in (check_kernels, time_attention, time_tree_stage):
            print(f"{part.__name__.replace('_', ' ')} ...", flush=True)
            part(report)
    print(report.table())
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
