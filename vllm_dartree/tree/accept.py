"""The walk along the target's own choices (METHOD section 2, step 6)."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from vllm_dartree.kernels import use_triton
from vllm_dartree.kernels.accept_walk import accept_walk, accept_walk_torch
from vllm_dartree.tree.topology import Topology


@dataclass
class Accepted:
    """The accepted path and what it emits, at most ``D`` nodes deep."""

    path: Tensor  # [R, D + 1] int64: rows by depth, first the anchor's 0; -1 past the end
    tokens: Tensor  # [R, D + 1] int64: the target's token of each row on the path; -1 past the end
    num_accepted: Tensor  # [R] int64: accepted nodes; one token more is emitted

    @classmethod
    def cat(cls, parts: Sequence["Accepted"]) -> "Accepted":
        """The requests of all parts."""
        if len(parts) == 1:
            return parts[0]
        return cls(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(cls)))


def walk(
    tokens: Tensor,
    parents: Tensor,
    tree: Topology,
    target_tokens: Tensor,
    max_depth: int,
    num_nodes: Tensor | None = None,
) -> Accepted:
    """Walks from the anchor as long as the target's token of a row is the token of one of its children.

    Every emitted token is the target's own choice after its true prefix, so the output is what the target alone
    would have emitted.

    Args:
        tokens: ``[R, B]`` int64, the drafted tokens.
        parents: ``[R, B + 1]`` int64.
        tree: the topology of ``parents``.
        target_tokens: ``[R, B + 1]`` int64, one token per row, chosen by the target.
        max_depth: ``D``, an upper bound of the depth.
        num_nodes: ``[R]`` int64, nodes that were verified, if fewer than ``B``: the first ones of each request.
    """
    if num_nodes is None:
        num_nodes = parents.new_full((parents.shape[0],), parents.shape[1] - 1)
    follow = accept_walk if use_triton(parents.device) else accept_walk_torch
    return Accepted(*follow(tokens, parents, tree.ancestors, tree.depths, target_tokens, num_nodes, max_depth))
