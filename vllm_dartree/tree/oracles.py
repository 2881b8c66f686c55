"""The tree algorithms in plain Python, one request at a time: baselines of the comparison and oracles of the tests.

They read single numbers from tensors and are no part of any hot path. All return a ``DraftTree`` of one request.
"""

import heapq
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from vllm_dartree.tree.head import CorrectionHead, DraftBlock, corrected_log_probs
from vllm_dartree.tree.prune import DraftTree
from vllm_dartree.tree.supertree import Supertree


def draft_tree(nodes: Sequence[tuple[int, int, float]], device: torch.device | str = "cpu") -> DraftTree:
    """A tree of one request from ``(token, row of the parent, score)`` of each node, in row order."""
    tokens, parents, scores = zip(*nodes, strict=True) if nodes else ((), (), ())
    return DraftTree(
        tokens=torch.tensor([tokens], dtype=torch.int64, device=device),
        parents=torch.tensor([(0, *parents)], dtype=torch.int64, device=device),
        scores=torch.tensor([scores], dtype=torch.float32, device=device),
    )


def best_first_heap(supertree: Supertree, budget: int, depth_bonus: float, request: int = 0) -> list[int]:
    """Supertree indices of one request in the order in which a max-heap best-first search pops them.

    The heap starts with the anchor's children; a popped node pushes its own. Equal keys pop by lower index. Nodes of
    probability zero are never pushed.
    """
    scores, parents = supertree.scores[request].tolist(), supertree.parents[request].tolist()
    keys = (supertree.scores[request] + depth_bonus * supertree.depths).tolist()
    children: dict[int, list[int]] = {}
    for index, parent in enumerate(parents):
        if scores[index] > float("-inf"):
            children.setdefault(parent, []).append(index)
    heap: list[tuple[float, int]] = []
    popped: list[int] = []
    frontier = children.get(-1, [])
    while len(popped) < budget:
        for index in frontier:
            heapq.heappush(heap, (-keys[index], index))
        if not heap:
            break
        popped.append(heapq.heappop(heap)[1])
        frontier = children.get(popped[-1], [])
    return popped


def sequential_heap(head: CorrectionHead, block: DraftBlock, budget: int, depth_bonus: float = 0.0) -> DraftTree:
    """Best-first search with the head in the loop: pop one node, run the head on it, push its children.

    It sees all ``K`` children of every node it pops, and pays one head call per node for it.
    """
    prepared = head.prepare(block)
    num_slots = block.candidates.shape[1]
    candidates = block.candidates[0].tolist()
    heap: list[tuple[float, int, float, int, int, int, Tensor]] = []
    nodes: list[tuple[int, int, float]] = []
    age = itertools.count()

    def push_children(row: int, slot: int, score: float, state: Tensor) -> None:
        log_probs = corrected_log_probs(head, prepared, block, slot, state)[0, 0].tolist()
        for choice, log_prob in enumerate(log_probs):
            if score + log_prob > float("-inf"):
                key = score + log_prob + depth_bonus * (slot + 1)
                # The running number breaks ties by age, and keeps the heap from comparing states.
                entry = (-key, next(age), score + log_prob, row, slot, choice, state)
                heapq.heappush(heap, entry)

    push_children(0, 0, 0.0, head.root_state(prepared))
    while heap and len(nodes) < budget:
        _, _, score, parent, slot, choice, state = heapq.heappop(heap)
        nodes.append((candidates[slot][choice], parent, score))
        if slot + 1 < num_slots and len(nodes) < budget:
            chosen = torch.tensor([[choice]], device=state.device)
            push_children(len(nodes), slot + 1, score, head.advance(prepared, slot, state, chosen))
    return draft_tree(nodes, block.base.device)


def marginal_heap(tokens: Tensor, log_probs: Tensor, budget: int) -> DraftTree:
    """DDTree's heap: the ``budget`` most probable paths if slots were independent.

    Ranks stand for tokens: the best unexplored path extends a popped one by the next slot's best token, or replaces
    its last token by the next best one.

    Args:
        tokens: ``[L, M]`` int64, the tokens of each slot in descending order of probability; ``M >= budget`` unless
            ``M`` is the whole vocabulary.
        log_probs: ``[L, M]``, theirs.
        budget: ``B``.
    """
    ids, values = tokens.tolist(), log_probs.tolist()
    # (-score, slot, rank, row of the parent, score of the parent); the first three are unique up to the parent.
    heap = [(-values[0][0], 0, 0, 0, 0.0)]
    nodes: list[tuple[int, int, float]] = []
    while heap and len(nodes) < budget:
        negative, slot, rank, parent, parent_score = heapq.heappop(heap)
        if negative == float("inf"):
            break
        nodes.append((ids[slot][rank], parent, -negative))
        if slot + 1 < len(ids):
            heapq.heappush(heap, (negative - values[slot + 1][0], slot + 1, 0, len(nodes), -negative))
        if rank + 1 < len(ids[slot]):
            heapq.heappush(heap, (-(parent_score + values[slot][rank + 1]), slot, rank + 1, parent, parent_score))
    return draft_tree(nodes, tokens.device)


def ddtree(logits: Tensor, budget: int) -> DraftTree:
    """A tree from uncorrected marginals, log-softmax over the vocabulary.

    Args:
        logits: ``[L, V]`` base logits.
        budget: ``B``.
    """
    values, tokens = logits.float().log_softmax(-1).topk(min(budget, logits.shape[-1]), dim=-1)
    return marginal_heap(tokens, values, budget)


def corrected_chain(head: CorrectionHead, block: DraftBlock) -> tuple[list[int], Tensor]:
    """The greedy left-to-right chain (Domino, DSpark) and the distributions met on the way.

    Returns:
        Candidate indices, one per slot, and corrected log-probabilities ``[L, K]``.
    """
    prepared = head.prepare(block)
    state = head.root_state(prepared)
    choices, distributions = [], []
    for slot in range(block.candidates.shape[1]):
        log_probs = corrected_log_probs(head, prepared, block, slot, state)[0, 0]
        best = log_probs.argmax()
        choices.append(int(best))
        distributions.append(log_probs)
        state = head.advance(prepared, slot, state, best.view(1, 1))
    return choices, torch.stack(distributions)


def chain_tree(head: CorrectionHead, block: DraftBlock) -> DraftTree:
    """The corrected chain as a tree of one node per depth."""
    choices, distributions = corrected_chain(head, block)
    nodes, score = [], 0.0
    for slot, choice in enumerate(choices):
        score += float(distributions[slot, choice])
        if score == float("-inf"):
            break
        nodes.append((int(block.candidates[0, slot, choice]), slot, score))
    return draft_tree(nodes, block.base.device)


def chain_marginals(head: CorrectionHead, block: DraftBlock) -> tuple[Tensor, Tensor]:
    """The distributions along the corrected chain as marginals: tokens and log-probabilities ``[L, K]``, descending."""
    _, distributions = corrected_chain(head, block)
    values, order = distributions.sort(dim=-1, descending=True, stable=True)
    return block.candidates[0].gather(1, order), values


def walk_naive(tokens: list[int], parents: list[int], target_tokens: list[int]) -> tuple[list[int], list[int]]:
    """Rows of the accepted path and the emitted tokens, step by step. Arguments are one request's rows."""
    row, path, emitted = 0, [0], [target_tokens[0]]
    while True:
        children = (r for r in range(1, len(parents)) if parents[r] == row and tokens[r - 1] == target_tokens[row])
        row = next(children, None)
        if row is None:
            return path, emitted
        path.append(row)
        emitted.append(target_tokens[row])
