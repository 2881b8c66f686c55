"""Kernels on tensors, each with its PyTorch twin."""
