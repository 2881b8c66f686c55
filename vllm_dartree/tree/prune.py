"""Deferred best-first pruning (METHOD section 2, step 4)."""

from dataclasses import dataclass

from torch import Tensor

from vllm_dartree.kernels import use_triton
from vllm_dartree.kernels.best_rows import best_rows, best_rows_torch
from vllm_dartree.tree.supertree import Supertree


@dataclass
class DraftTree:
    """The nodes to verify, in the order that the package's docstring fixes."""

    tokens: Tensor  # [R, B] int64; column i - 1 is node i
    parents: Tensor  # [R, B + 1] int64, row of the parent; 0 for the anchor, -1 for a dead node
    scores: Tensor  # [R, B] float32, log-probability of the path; -inf for a dead node


def prune(supertree: Supertree, budget: int, depth_bonus: float) -> DraftTree:
    """Keeps the ``budget`` nodes with the highest keys ``score + depth_bonus * depth``.

    Scores are sums of log-probabilities and ``depth_bonus <= 0``, so a key is never above its parent's, and ties go to
    the lower index, hence to the parent: the result is closed under parents, and equals what a max-heap best-first
    search over the same supertree would pop (Lemma 1). If the supertree is smaller than the budget, dead rows follow.

    Args:
        supertree: ``N`` nodes.
        budget: ``B >= 1``.
        depth_bonus: ``beta <= 0``; ``TreeConfig`` refuses others.
    """
    keep = best_rows if use_triton(supertree.scores.device) else best_rows_torch
    return DraftTree(
        *keep(supertree.tokens, supertree.parents, supertree.depths, supertree.scores, budget, depth_bonus)
    )
