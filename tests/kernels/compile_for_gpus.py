"""Compiles every kernel down to machine code for GPUs that are not here, with the arguments its launcher gives it.

A program of its own: in the tests' process kernels belong to the interpreter.
"""

import sys

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from vllm_dartree.kernels import kv_move, tree_attention
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
    kv_move.move_slots(kv_cache, one[None].expand(1, 16), one[None].expand(1, 16))


if __name__ == "__main__":
    for module in (tree_attention, kv_move):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            setattr(module, name, CompiledOnly(getattr(module, name)))
    for capability in map(int, sys.argv[1:]):
        driver.set_active(AbsentGPU(capability))
        compile_all(torch.bfloat16, 128, 1, None, None)
        compile_all(torch.float16, 80, 4, 4096, 30.0)
        compile_all(torch.bfloat16, 256, 1, 1024, None)
        compile_all(torch.float32, 64, 1, None, None)
