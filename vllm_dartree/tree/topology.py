"""Depths and ancestors of a tree, derived from its parents."""

from dataclasses import dataclass

from torch import Tensor

from vllm_dartree.kernels.plant import topology_torch


@dataclass
class Topology:
    """What the verify forward needs: RoPE positions are the anchor's plus ``depths``; row ``i`` attends to the
    committed context and to the rows ``j`` with ``ancestors[r, i, j]``."""

    depths: Tensor  # [R, B + 1] int64; 0 for the anchor and for dead nodes
    ancestors: Tensor  # [R, B + 1, B + 1] bool, itself included; a dead node has only itself


def topology(parents: Tensor, max_depth: int | None = None) -> Topology:
    """Derives depths and ancestors in ``log2(max_depth)`` steps, whatever the order of the nodes.

    Args:
        parents: ``[R, B + 1]`` int64, as in ``DraftTree``; any prefix of its rows works as well.
        max_depth: an upper bound of the depth, to save steps; None takes the number of nodes.
    """
    depths, ancestors = topology_torch(parents, max_depth or parents.shape[1] - 1)
    return Topology(depths, ancestors)
