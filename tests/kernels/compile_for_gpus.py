"""Compiles every kernel down to machine code for GPUs that are not here, with the arguments its launcher gives it.

A program of its own: in the tests' process kernels belong to the interpreter.
"""

import sys

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from vllm_dartree.kernels import (
    accept_walk,
    best_rows,
    domino_step,
    kv_move,
    path_logits,
    plant,
    tree_attention,
    verify_rows,
)
from vllm_dartree.tree import topology


class AbsentGPU:
    """As much of a Triton driver as compiling asks for."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        # Triton keeps compiled kernels by device.
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0


class CompiledOnly:
    """Takes a kernel's place in its module."""

    def __init__(self, kernel) -> None:
        self.kernel = kernel

    def __getitem__(self, grid):
        def compile_kernel(*args: object, **kwargs: object) -> None:
            compiled = self.kernel.warmup(*args, grid=grid, **kwargs)
            metadata = compiled.metadata
            print(f"{metadata.name} sm_{driver.active.capability}: {metadata.shared} bytes of shared memory")
            # What a block may use on the smallest GPU of this kind.
            assert metadata.shared <= {80: 99, 90: 227}[driver.active.capability] * 1024
            assert compiled.asm["cubin"]

        return compile_kernel


def compile_all(
    dtype: torch.dtype, head_size: int, num_splits: int, window: int | None, soft_cap: float | None
) -> None:
    kv_heads, groups, rows = 2, 4, 65
    kv_cache = torch.zeros(3, kv_heads, 16, 2 * head_size, dtype=dtype)
    query = torch.zeros(rows, kv_heads * groups, head_size, dtype=dtype)
    one = torch.ones(1, dtype=torch.int64)
    chain = topology(torch.arange(rows)[None] - 1)
    tree_attention.tree_attention(
        query,
        *kv_cache.chunk(2, dim=-1),
        torch.zeros_like(query),
        torch.zeros(1, 8, dtype=torch.int32),
        one,
        one,
        one,
        chain.ancestors,
        chain.depths,
        1.0,
        window,
        soft_cap,
        num_splits,
    )
    kv_move.move_slots([kv_cache, kv_cache], one[None].expand(1, 16), one[None].expand(1, 16))


def compile_tree_stage(dtype: torch.dtype, corrected: bool) -> None:
    """At the sizes of Qwen3-8B's Domino head and the default tree."""
    requests, branches, candidates, width, slots, size, emb, budget = 2, 12, 64, 12, 15, 1024, 512, 64
    states = torch.zeros(requests, branches, 4 * size + emb, dtype=dtype)
    ids, scores = torch.zeros(requests, candidates, dtype=torch.int64), torch.zeros(requests, branches)
    domino_step.best_children(
        torch.zeros(requests, slots, emb, dtype=dtype)[:, 3],
        states[..., size : size + emb],
        torch.zeros(70, emb, dtype=dtype),
        ids,
        torch.zeros(requests, candidates),
        scores,
        width,
        corrected,
    )
    rows = torch.empty(requests, width, states.shape[-1], dtype=dtype)
    domino_step.gru_step(torch.zeros(requests, width, 3 * size, dtype=dtype), states, ids[:, :width], rows[..., :size])
    nodes = torch.zeros(requests, width * slots, dtype=torch.int64)
    best_rows.best_rows(nodes, nodes, nodes[0], nodes.float(), budget, -0.2)
    chain = topology((torch.arange(budget + 1) - 1).expand(requests, -1))
    rows_of_nodes = torch.zeros(requests, budget + 1, dtype=torch.int64)
    as_chain, tokens = torch.zeros(requests, dtype=torch.bool), torch.zeros(requests, budget, dtype=torch.int64)
    planted = rows_of_nodes, chain.depths, chain.ancestors
    plant.plant(tokens, rows_of_nodes, ids[:, 0], as_chain, slots, *planted)
    accept_walk.accept_walk(
        tokens, rows_of_nodes, chain.ancestors, chain.depths, rows_of_nodes, ids[:, 0].contiguous(), slots
    )
    flat = torch.zeros(requests * (budget + 1), dtype=torch.int64)
    bounds = torch.arange(requests + 1) * (budget + 1)
    verify_rows.begin_rows(flat, flat, bounds, flat[:requests].int(), flat[:requests].int(), *planted)
    verify_rows.path_tokens(rows_of_nodes[:, : slots + 1].contiguous(), flat, bounds, flat[:requests], flat, len(flat))


def compile_path_logits() -> None:
    rows, depth, slots, vocabulary = 2, 15, 3, 70
    logits, paths = torch.zeros(rows, vocabulary), torch.zeros(rows, depth, dtype=torch.int64)
    depths, slot_of_row = paths[:, 0].contiguous(), torch.zeros(rows, dtype=torch.int32)
    penalties, counts = torch.zeros(3, slots), torch.zeros(slots, vocabulary, dtype=torch.int32)
    path_logits.penalise_paths(logits, logits[:, :depth].contiguous(), paths, slot_of_row, *penalties, counts)
    lengths, words = torch.zeros(slots, dtype=torch.int32), 3
    path_logits.forbid_bad_words(
        logits, paths, depths, slot_of_row, counts, counts, lengths, counts, lengths, lengths, words, 7
    )


if __name__ == "__main__":
    for module in (tree_attention, kv_move, domino_step, best_rows, plant, accept_walk, verify_rows, path_logits):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            setattr(module, name, CompiledOnly(getattr(module, name)))
    for capability in map(int, sys.argv[1:]):
        driver.set_active(AbsentGPU(capability))
        compile_all(torch.bfloat16, 128, 1, None, None)
        compile_all(torch.float16, 80, 4, 4096, 30.0)
        compile_all(torch.bfloat16, 256, 1, 1024, None)
        compile_all(torch.float32, 64, 1, None, None)
        compile_tree_stage(torch.bfloat16, True)
        compile_tree_stage(torch.float32, True)
        compile_tree_stage(torch.bfloat16, False)
        compile_path_logits()
