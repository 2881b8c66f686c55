"""Deferred best-first pruning (METHOD section 2, step 4)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from vllm_dartree.tree.head import best_first
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
    num_requests, num_nodes = supertree.tokens.shape
    keys = supertree.scores + depth_bonus * supertree.depths
    kept = min(budget, num_nodes)
    _, chosen = best_first(keys, kept)  # [R, kept] supertree indices
    scores = supertree.scores.gather(1, chosen)
    dead = scores == float("-inf")
    # Row of every supertree node, shifted by one so that the anchor's index -1 finds row 0.
    rows = torch.zeros(num_requests, num_nodes + 1, dtype=torch.int64, device=keys.device)
    row_numbers = torch.arange(1, kept + 1, device=keys.device).expand(num_requests, -1)
    rows.scatter_(1, chosen + 1, row_numbers)
    parents = rows.gather(1, supertree.parents.gather(1, chosen) + 1).masked_fill(dead, -1)
    tokens = supertree.tokens.gather(1, chosen).masked_fill(dead, 0)
    spare = budget - kept
    return DraftTree(
        tokens=torch.nn.functional.pad(tokens, (0, spare)),
        parents=torch.nn.functional.pad(torch.nn.functional.pad(parents, (1, 0)), (0, spare), value=-1),
        scores=torch.nn.functional.pad(scores, (0, spare), value=float("-inf")),
    )
