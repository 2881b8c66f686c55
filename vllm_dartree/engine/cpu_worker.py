"""The worker for CPUs: vLLM's, with the tree's model runner. A file of its own, since its imports need a CPU build."""

from vllm.v1.worker.cpu import model_runner as cpu_model_runner
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_dartree.engine.runner import DartreeRunnerMixin

_NativeRunner = cpu_model_runner.CPUModelRunner


class DartreeCPUModelRunner(DartreeRunnerMixin, _NativeRunner):
    """For ``DartreeCPUWorker``."""


class DartreeCPUWorker(CPUWorker):
    """``CPUWorker.init_device`` imports its runner's class by name, so that name is ours while it runs."""

    def init_device(self) -> None:
        cpu_model_runner.CPUModelRunner = DartreeCPUModelRunner
        try:
            super().init_device()
        finally:
            cpu_model_runner.CPUModelRunner = _NativeRunner
