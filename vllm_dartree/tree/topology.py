"""Depths and ancestors of a tree, derived from its parents."""

from dataclasses import dataclass

import torch
from torch import Tensor


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
    num_rows = parents.shape[1]
    # After n steps `ancestors` holds those less than 2**n levels up, and `up` is the row 2**n levels up, or -1.
    ancestors = torch.eye(num_rows, dtype=torch.bool, device=parents.device).expand(parents.shape[0], -1, -1)
    up = parents.clone()
    up[:, 0] = -1
    for _ in range((max_depth or num_rows - 1).bit_length()):
        above = up.clamp(min=0)
        reaches = (up >= 0)[..., None]
        ancestors = ancestors | (ancestors.gather(1, above[..., None].expand_as(ancestors)) & reaches)
        up = up.gather(1, above).where(up >= 0, -1)
    return Topology(depths=ancestors.sum(-1) - 1, ancestors=ancestors)
