"""The worker for GPUs: vLLM's, with the tree's model runner."""

from vllm.v1.worker.gpu_worker import Worker

from vllm_dartree.engine.runner import DartreeModelRunner


class DartreeWorker(Worker):
    """``Worker._make_model_runner`` is vLLM's own hook for this."""

    def _make_model_runner(self) -> DartreeModelRunner:
        return DartreeModelRunner(self.vllm_config, self.device)
