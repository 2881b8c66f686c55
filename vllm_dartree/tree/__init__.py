"""The draft tree: grow a supertree, prune it, derive its topology, walk it. Tensors in, tensors out.

What every other room takes from here:

* A request's tree has ``B + 1`` *rows*. Row 0 is the *anchor* (the root, depth 0); row ``i`` in ``1..B`` is node ``i``,
  and its token stands in column ``i - 1`` of the ``[R, B]`` draft tokens.
* Nodes stand in descending order of their *key*, ``score + depth_bonus * depth``, and ties keep the order of the
  supertree. Keys never rise along a path, so parents come before children and *the first n rows are a valid tree
  for every n*.
* ``parents[r, i]`` is the row of node ``i``'s parent; it is 0 for row 0 itself and -1 for a *dead* node. Dead nodes
  come last, have token 0, depth 0, and are ancestors of nobody.
* Siblings have distinct tokens.
"""

from vllm_dartree.tree.accept import Accepted, walk
from vllm_dartree.tree.config import TreeConfig, TreeConfigError
from vllm_dartree.tree.head import Branches, CorrectionHead, DraftBlock, draft_block
from vllm_dartree.tree.prune import DraftTree, prune
from vllm_dartree.tree.supertree import Supertree, expand
from vllm_dartree.tree.topology import Topology, topology

__all__ = [
    "Accepted",
    "Branches",
    "CorrectionHead",
    "DraftBlock",
    "DraftTree",
    "Supertree",
    "Topology",
    "TreeConfig",
    "TreeConfigError",
    "draft_block",
    "expand",
    "prune",
    "topology",
    "walk",
]
