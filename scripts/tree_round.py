"""A round's tree stage at the sizes of a real model, with random weights, for the benchmark and the GPU check."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_dartree.engine.commit import CachedLayer, commit_rows
from vllm_dartree.engine.kv_layout import PagedLayout
from vllm_dartree.engine.state import TreeState
from vllm_dartree.heads.domino import DominoHead, DominoSpec
from vllm_dartree.kernels import KERNELS_VARIABLE, use_triton
from vllm_dartree.tree import DraftBlock, TreeConfig, draft_block, expand, prune, walk
from vllm_dartree.tree.oracles import sequential_heap

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
        shape = torch.Size((1 + num_requests * blocks, sizes.kv_heads, BLOCK_SIZE, 2 * sizes.head_size))
        self.layers = [
            CachedLayer(str(index), SimpleNamespace(kv_cache=weight.new_zeros(shape)), PagedLayout(use_triton(device)))
            for index in range(sizes.layers)
        ]
        self.mappings = dict.fromkeys((layer.name for layer in self.layers), mapping.flatten())
        self.features = [weight.new_empty(num_requests * rows, sizes.hidden).normal_() for _ in range(5)]
        self.batch = SimpleNamespace(
            num_reqs=num_requests,
            num_tokens=num_requests * rows,
            cu_num_logits=torch.arange(num_requests + 1, device=device) * rows,
            logits_indices=torch.arange(num_requests * rows, device=device),
            expanded_local_pos=torch.arange(rows, device=device).repeat(num_requests),
            idx_mapping=self.slots,
            positions=place.repeat(num_requests),
        )
        self.positions = self.batch.positions.clone()
        # Every element of the cache another number, as far as the type goes.
        self.numbers = torch.arange(shape.numel(), device=device).view(shape).to(weight.dtype)
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
        self.moved = commit_rows(self.step, self.layers, self.mappings, self.batch.positions, self.features)

    @property
    def stages(self) -> dict[str, Callable[[], object]]:
        names = ("select", "expand", "prune", "plant", "begin", "accept", "commit")
        return {name: getattr(self, name) for name in names}

    def outcome(self, name: str) -> list[Tensor]:
        """What a stage left behind."""
        match name:
            case "prune":
                return [self.tree.tokens, self.tree.parents, self.tree.scores]
            case "plant":
                return [self.tokens, self.state.parents, self.state.depths, self.state.ancestors]
            case "begin":
                step = self.step
                shape = step.topology
                return [step.requests, step.rows, step.roots, step.num_nodes, shape.depths, self.batch.positions]
            case "accept":
                return list(vars(self.step.accepted).values())
        return [layer.attention.kv_cache for layer in self.layers] + self.moved

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


def with_kernels(kernels: str, function: Callable[[], object]) -> Callable[[], object]:
    """The same with the Triton kernels, or with their twins."""

    def run() -> None:
        with mock.patch.dict(os.environ, {KERNELS_VARIABLE: kernels}):
            function()

    return run


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


def milliseconds(function: Callable[[], object], device: torch.device) -> float:
    """Of one call: CUDA events on a GPU; on a CPU wall clock, or the thread's own time if there is but one.

    The time of a lone thread is what the wall clock would show if nobody else used the machine.
    """
    if device.type == "cpu":
        clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        start = clock()
        function()
        return (clock() - start) * 1e3
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
