"""The kernels run in Triton's interpreter here, which must be told before any of them is imported."""

from vllm_dartree.emulation import activate

activate()
