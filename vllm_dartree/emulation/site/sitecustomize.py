"""Run first by every Python process that has this folder on its path: see ``vllm_dartree.emulation``."""

from vllm_dartree.emulation import activate

activate()
