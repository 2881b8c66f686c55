"""Checks every kernel on a GPU against its twin, and times what a round of Qwen3-8B would spend on trees.

It needs PyTorch and Triton and nothing else, takes a few minutes, and prints a short table last. It exits with 1 if a
check fails, and with 2 where there is no GPU.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone that is not installed

sys.path.insert(0, str(Path(__file__).resolve().parent))

from tree_round import Round, Sizes, captured, fastest, measured_bandwidth, random_head, with_kernels

from vllm_dartree.engine.kv_layout import PagedLayout
from vllm_dartree.heads.domino import DominoHead, DominoSpec
from vllm_dartree.kernels.kv_move import move_slots, move_slots_torch
from vllm_dartree.kernels.path_logits import (
    forbid_bad_words,
    forbid_bad_words_torch,
    penalise_paths,
    penalise_paths_torch,
)
from vllm_dartree.kernels.tree_attention import tree_attention, tree_attention_torch
from vllm_dartree.tree import Topology, topology

try:
    from flash_attn import flash_attn_func
except ImportError:
    flash_attn_func = None

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
        move_slots_torch([expected], source, destination)
        move_slots([moved], source, destination)
        if not torch.equal(expected, moved):
            return False
    return True


def path_logits_as_their_twins(device: str, num_rows: int = 130, vocabulary: int = 151936) -> dict[str, bool]:
    """Whether penalties, to within float32's rounding, and bad words come out as those of the twins."""
    torch.manual_seed(0)
    slots, max_depth, length = 3, 15, 200
    logits = torch.randn(num_rows, vocabulary, device=device)
    depths = torch.randint(max_depth + 1, (num_rows,), device=device)
    paths = torch.randint(9, (num_rows, max_depth), device=device)
    paths = paths.where(torch.arange(max_depth, device=device) < depths[:, None], -1)
    slot_of_row = torch.randint(slots, (num_rows,), device=device, dtype=torch.int32)
    counts = torch.randint(3, (slots, vocabulary), device=device, dtype=torch.int32)
    penalties = torch.tensor([[1.3, 1.0, 0.8], [0.5, 0.0, 0.7], [1.1, 0.0, -0.4]], device=device)
    texts = torch.randint(9, (slots, length), device=device, dtype=torch.int32)
    words = torch.randint(9, (slots, 12), device=device, dtype=torch.int32)
    offsets = torch.tensor([[0, 1, 3, 12]] * slots, device=device, dtype=torch.int32)
    texts[0, -8:] = words[0, 3:11]  # all of the longest word but its last token
    prompt_len = torch.tensor([1, 90, length], device=device, dtype=torch.int32)
    total_len, num_words = torch.full_like(prompt_len, length), torch.tensor([3, 3, 2], device=device).int()
    unpenalised = logits.gather(1, paths.clamp(min=0))
    penalised, forbidden = [logits.clone(), logits.clone()], [logits.clone(), logits.clone()]
    for penalise, values in zip((penalise_paths, penalise_paths_torch), penalised, strict=True):
        penalise(values, unpenalised, paths, slot_of_row, *penalties, counts)
    for forbid, values in zip((forbid_bad_words, forbid_bad_words_torch), forbidden, strict=True):
        forbid(values, paths, depths, slot_of_row, words, offsets, num_words, texts, prompt_len, total_len, 3, 9)
    return {
        "penalties on paths": torch.allclose(*penalised) and not torch.equal(penalised[1], logits),
        "bad words on paths": torch.equal(*forbidden) and not torch.equal(forbidden[1], logits),
    }


def milliseconds(function: Callable[[], object]) -> float:
    """The least time of a call on the GPU."""
    return fastest({"call": function}, 30, torch.device("cuda"))["call"]


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

    def bar(self, name: str, value: float, limit: float) -> None:
        """A ratio that is meant to stay below a limit; it tells of speed, so that a miss is no failure."""
        self.lines.append((name, f"{value:8.2f}x {'met' if value <= limit else 'MISSED'} (bar: {limit:.2f}x)"))

    def table(self) -> str:
        width = max(len(name) for name, _ in self.lines)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in self.lines)


def tree_kernels_against_twins(round_: Round) -> dict[str, bool]:
    """By stage, whether its kernel gives what its twin gives; those after the expansion to the bit."""
    found: dict[str, dict[str, list[Tensor]]] = {}
    supertree, same = round_.supertree, {}
    for kernels in ("torch", "triton"):
        with_kernels(kernels, round_.expand)()
        found[kernels] = {"expand": [round_.supertree.scores, round_.supertree.tokens]}
        # Both go on from the same supertree: where two paths are all but tied, the last bit decides.
        round_.supertree = supertree
        for name in ("prune", "plant", "begin", "accept", "commit"):
            round_.batch.positions.copy_(round_.positions)
            for layer in round_.layers:
                layer.layout = PagedLayout(kernels == "triton")
                layer.attention.kv_cache.copy_(round_.numbers)
            with_kernels(kernels, round_.stages[name])()
            found[kernels][name] = [tensor.clone() for tensor in round_.outcome(name)]
    for name, tensors in found["torch"].items():
        pairs = zip(tensors, found["triton"][name], strict=True)
        same[name] = all(torch.equal(*pair) for pair in pairs)
    scores, of_kernel = (found[kernels]["expand"][0].sort(-1).values for kernels in ("torch", "triton"))
    same["expand"] = torch.allclose(scores, of_kernel, rtol=1e-2, atol=1e-2, equal_nan=True)
    return same


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
    for name, same in path_logits_as_their_twins("cuda").items():
        report.check(f"{name} = twin", same)
    report.check("attention in a CUDA graph follows its buffers", replay_follows_its_buffers())
    small = Sizes(hidden=512, state=256, emb=128, vocabulary=2000, layers=4)
    for dtype in (torch.float32, torch.bfloat16):
        head = random_head(small.hidden, small.vocabulary, small.state, small.emb, small.slots, "cuda", dtype)
        for stage, same in tree_kernels_against_twins(Round(head, small, 5)).items():
            report.check(f"{stage} = twin, {str(dtype).removeprefix('torch.')}", same)


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
            milliseconds(lambda source=source, destination=destination: move_slots([cache], source, destination)),
        )


def time_long_contexts(report: Report) -> None:
    """One request: the context is split until it fills the GPU, and cost grows with its length and no faster."""
    times = {}
    for context in (8192, 16384, 32768, 65536):
        verify = random_verify([context], 64, "cuda", torch.bfloat16)
        verify.num_rows.fill_(65)
        verify.query = torch.randn(65, 32, 128, device="cuda", dtype=torch.bfloat16)
        verify.kv_cache.nan_to_num_()
        out = torch.zeros_like(verify.query)
        query, keys, values, _ = verify.dense(0)
        compared = {
            "tree": lambda verify=verify, out=out: verify.attend(tree_attention, out),
            "one part": lambda verify=verify, out=out: verify.attend(tree_attention, out, num_splits=1),
            "plain": lambda q=query, k=keys, v=values: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        }
        if flash_attn_func is not None:
            flat = [part.transpose(1, 2) for part in (query, keys, values)]
            compared["FlashAttention"] = lambda parts=flat: flash_attn_func(*parts)
        times[context] = found = fastest(compared, 20, verify.query.device)
        if flash_attn_func is not None:
            report.time(f"FlashAttention without a mask, {context} context", found["FlashAttention"])
        report.time(f"verify attention, {context} context", found["tree"], f"(unsplit: {found['one part']:.3f} ms)")
        report.bar(f"against plain attention, {context} context", found["tree"] / found["plain"], 1.15)
    growth = times[65536]["tree"] / times[16384]["tree"] / 4
    report.bar("growth from 16384 to 65536 context, over linear", growth, 1.1)


def time_tree_stage(report: Report) -> None:
    """At the sizes of Qwen3-8B, with one random head."""
    sizes, device = Sizes(), torch.device("cuda")
    bandwidth = measured_bandwidth(device)
    report.lines.append(("bandwidth", f"{bandwidth / 1e9:8.0f} GB/s"))
    head = random_head(sizes.hidden, sizes.vocabulary, sizes.state, sizes.emb, sizes.slots, "cuda", torch.bfloat16)
    for requests in (1, 4, 16):
        round_ = Round(head, sizes, requests)
        graph, _ = captured(round_.propose)
        graph.replay()
        replayed = round_.tokens.clone()
        round_.propose()
        report.check(f"tree stage, CUDA graph = eager, {requests} requests", torch.equal(replayed, round_.tokens))
        compared = {
            "twins": with_kernels("torch", round_.propose),
            "kernels": round_.propose,
            "graph": graph.replay,
            "commit": round_.commit,
        }
        times = fastest(compared, 20, device)
        num_bytes = round_.bytes_of_stages()
        floor = sum(num_bytes[name] for name in ("select", "expand", "prune", "plant")) / bandwidth * 1e3
        report.time(f"tree stage, twins, {requests} requests", times["twins"])
        report.time(f"tree stage, kernels, {requests} requests", times["kernels"])
        report.time(f"tree stage, CUDA graph, {requests} requests", times["graph"], f"(floor: {floor:.3f} ms)")
        report.bar(f"kernels over twins, {requests} requests", times["kernels"] / times["twins"], 1.0)
        report.time(f"commit of {sizes.layers} layers, {requests} requests", times["commit"])


@dataclass(frozen=True)
class PipelineSizes:
    """Of a target and its drafter; the defaults are Qwen3-4B's."""

    hidden: int = 2560
    intermediate: int = 9728
    layers: int = 36
    heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    vocabulary: int = 151936
    drafter_layers: int = 5
    state: int = 1024
    emb: int = 512


def time_pipeline(report: Report, sizes: PipelineSizes | None = None, device: str = "cuda", tokens: int = 64) -> None:
    """Tokens per second of the reference decoder with random weights: that all its parts work together, and no more.

    Next to nothing is accepted of what a random drafter drafts.
    """
    try:
        from transformers import Qwen3Config, Qwen3ForCausalLM
    except ImportError:
        report.lines.append(("reference decoder", "skipped, it needs transformers"))
        return
    from vllm_dartree.reference.checkpoint import Drafter, Target
    from vllm_dartree.reference.decoder import ReferenceDecoder, Summary
    from vllm_dartree.reference.drafter import BlockDrafter

    sizes = sizes or PipelineSizes()
    shared = {
        "vocab_size": sizes.vocabulary,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_size,
        "max_position_embeddings": 4096,
    }
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    layer_ids = tuple(range(0, sizes.layers, max(1, sizes.layers // 5)))[:5]
    spec = DominoSpec(16, 0, layer_ids, gru_hidden_dim=sizes.state, emb_dim=sizes.emb)
    with torch.device(device):
        target = Qwen3ForCausalLM(Qwen3Config(**shared, num_hidden_layers=sizes.layers)).to(dtype).eval()
        backbone = BlockDrafter(Qwen3Config(**shared, num_hidden_layers=sizes.drafter_layers), spec).to(dtype).eval()
    target.generation_config.eos_token_id = None
    target, backbone = target.requires_grad_(False), backbone.requires_grad_(False)
    head = DominoHead(spec, backbone.state_dict(), target.get_input_embeddings())
    for system in ("ar", "dartree"):
        decoder = ReferenceDecoder(Target(target, None), Drafter(backbone, spec, head), system)
        decoder.generate([1, 2, 3], 8)
        generation = decoder.generate(list(range(1, 65)), tokens)
        summary = Summary.of([generation])
        report.check(
            f"reference decoder, {system}",
            len(generation.tokens) == tokens,
            f"({summary.tokens_per_second:.1f} tokens/s, tau {summary.tau:.2f}; weights are random)",
        )


def main() -> int:
    if not torch.cuda.is_available():
        print("gpu_check needs a GPU, and PyTorch finds none here.", file=sys.stderr)
        return 2
    report = Report([("device", torch.cuda.get_device_name()), ("torch", torch.__version__)])
    with torch.inference_mode():
        for part in (check_kernels, time_attention, time_long_contexts, time_tree_stage, time_pipeline):
            print(f"{part.__name__.replace('_', ' ')} ...", flush=True)
            part(report)
    print(report.table())
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
