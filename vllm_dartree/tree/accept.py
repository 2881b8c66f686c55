"""The walk along the target's own choices (METHOD section 2, step 6)."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

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
    would have emitted. Instead of a loop over depths: a node is on the path exactly if it and all its ancestors carry
    the token that the target chose at their parents; since siblings differ, there is at most one per depth.

    Args:
        tokens: ``[R, B]`` int64, the drafted tokens.
        parents: ``[R, B + 1]`` int64.
        tree: the topology of ``parents``.
        target_tokens: ``[R, B + 1]`` int64, one token per row, chosen by the target.
        max_depth: ``D``, an upper bound of the depth.
        num_nodes: ``[R]`` int64, nodes that were verified, if fewer than ``B``: the first ones of each request.
    """
    num_requests, num_rows = parents.shape
    rows = torch.arange(num_rows, device=parents.device)
    usable = parents[:, 1:] >= 0
    if num_nodes is not None:
        usable &= rows[1:] <= num_nodes[:, None]
    chosen_at_parent = target_tokens.gather(1, parents[:, 1:].clamp(min=0))
    follows = torch.ones_like(parents, dtype=torch.bool)
    follows[:, 1:] = usable & (tokens == chosen_at_parent)
    on_path = (follows[:, None] | ~tree.ancestors).all(-1)  # [R, B + 1]
    # Rows off the path are written to a last column that is cut off.
    depth = tree.depths.where(on_path, max_depth + 1)
    path = torch.full((num_requests, max_depth + 2), -1, dtype=torch.int64, device=parents.device)
    path = path.scatter(1, depth, rows.expand(num_requests, -1))[:, :-1]
    emitted = target_tokens.gather(1, path.clamp(min=0)).where(path >= 0, -1)
    return Accepted(path, emitted, on_path.sum(-1) - 1)
