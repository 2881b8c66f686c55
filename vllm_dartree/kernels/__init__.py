"""Kernels on tensors, each with its PyTorch twin."""

import os

import torch

KERNELS_VARIABLE = "DARTREE_KERNELS"


def use_triton(device: torch.device) -> bool:
    """Whether the Triton kernels run, and not their twins: on a GPU, unless the environment says otherwise.

    Raises:
        ValueError: the variable has a value that it cannot have.
    """
    choice = os.environ.get(KERNELS_VARIABLE) or ("triton" if device.type == "cuda" else "torch")
    if choice not in ("triton", "torch"):
        raise ValueError(f"{KERNELS_VARIABLE} is {choice!r}; it must be 'triton' or 'torch', or be unset")
    return choice == "triton"
