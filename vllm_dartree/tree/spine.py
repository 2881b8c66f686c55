"""The chain inside a tree, for requests whose processing needs one."""

import torch
from torch import Tensor

from vllm_dartree.tree.prune import DraftTree
from vllm_dartree.tree.topology import Topology


def keep_spine(tree: DraftTree, shape: Topology, where: Tensor) -> DraftTree:
    """Reduces the trees of some requests to their *spine*: from the anchor on, always the best child.

    Args:
        tree: ``B`` nodes.
        shape: the topology of ``tree.parents``.
        where: ``[R]`` bool, the requests to reduce; the others keep their trees.

    Returns:
        Trees of the same shape; a reduced one has parents 0, 1, 2, ..., then dead nodes.
    """
    num_rows = tree.parents.shape[1]
    rows = torch.arange(num_rows, device=where.device)
    # Rows stand in descending order of their keys, and siblings share their depth: the first child is the best.
    siblings = tree.parents[:, :, None] == tree.parents[:, None, :]
    has_better = (siblings & (rows[:, None] > rows) & (rows > 0)).any(-1)
    alive = tree.parents >= 0
    on_spine = ((~has_better[:, None] & alive[:, None]) | ~shape.ancestors).all(-1)  # [R, B + 1]
    order = (~on_spine).to(torch.int8).argsort(dim=1, stable=True)
    depth = on_spine.sum(1, keepdim=True) - 1
    dead = rows > depth
    parents = (rows - 1).clamp(min=0).expand_as(tree.parents).masked_fill(dead, -1)
    nodes = order[:, 1:] - 1
    tokens = tree.tokens.gather(1, nodes).masked_fill(dead[:, 1:], 0)
    scores = tree.scores.gather(1, nodes).masked_fill(dead[:, 1:], float("-inf"))
    where = where[:, None]
    return DraftTree(
        tokens.where(where, tree.tokens), parents.where(where, tree.parents), scores.where(where, tree.scores)
    )
