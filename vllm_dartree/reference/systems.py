"""Every system of the comparison: from one drafter forward to the tree that the target verifies.

All of them draft from the same weights and are verified by the same decoder; what differs stands here.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vllm_dartree.heads import MarginalHead
from vllm_dartree.tree import CorrectionHead, DraftBlock, DraftTree, TreeConfig, draft_block, expand, prune
from vllm_dartree.tree.config import TreeVariant
from vllm_dartree.tree.head import corrected_log_probs
from vllm_dartree.tree.oracles import chain_marginals, ddtree, marginal_heap, sequential_heap


@dataclass
class Draft:
    """What one drafter forward yields for one request."""

    anchor: Tensor  # [1] int64
    hidden: Tensor  # [1, L, H]
    logits: Tensor  # [1, L, V] base logits


@dataclass
class Proposal:
    """A tree, and the distribution over the next slot that the system held while it drew the tree."""

    tree: DraftTree
    head: CorrectionHead
    block: DraftBlock


def _grown(draft: Draft, block: DraftBlock, head: CorrectionHead, config: TreeConfig) -> Proposal:
    widths = config.widths(block.candidates.shape[1])
    return Proposal(prune(expand(head, block, widths), config.budget, config.depth_bonus), head, block)


def _ddtree(draft: Draft, block: DraftBlock, config: TreeConfig) -> Proposal:
    return Proposal(ddtree(draft.logits[0, : config.depth], config.budget), MarginalHead(), block)


def _domino_chain_ddtree(head: CorrectionHead, block: DraftBlock, config: TreeConfig) -> Proposal:
    tokens, log_probs = chain_marginals(head, block)
    tree = marginal_heap(tokens[: config.depth], log_probs[: config.depth], config.budget)
    return Proposal(tree, MarginalHead(), replace(block, candidates=tokens[None], base=log_probs[None]))


def _sequential_heap(head: CorrectionHead, block: DraftBlock, config: TreeConfig) -> Proposal:
    return Proposal(sequential_heap(head, block, config.budget, config.depth_bonus), head, block)


@dataclass(frozen=True)
class System:
    """One row of the comparison.

    Args:
        propose: from a draft, its top-K block, the checkpoint's head and the knobs to a proposal; None drafts nothing.
        needs: the head that the drafter's checkpoint must have; None takes any.
        variant: of the knobs, for what grows a supertree; None for what draws its tree otherwise.
    """

    propose: Callable[[Draft, DraftBlock, CorrectionHead, TreeConfig], Proposal] | None
    needs: str | None = None
    variant: TreeVariant | None = None


SYSTEMS: dict[str, System] = {
    "ar": System(None),
    "dflash": System(lambda draft, block, head, config: _grown(draft, block, MarginalHead(), config), variant="chain"),
    "domino": System(_grown, needs="domino", variant="chain"),
    "dspark": System(_grown, needs="markov", variant="chain"),
    "ddtree": System(lambda draft, block, head, config: _ddtree(draft, block, config)),
    "domino_chain_ddtree": System(
        lambda draft, block, head, config: _domino_chain_ddtree(head, block, config), needs="domino"
    ),
    "sequential_heap": System(lambda draft, block, head, config: _sequential_heap(head, block, config)),
    "dflash2": System(_grown, needs="selector", variant="chain"),
    "dartree_fixed": System(_grown, variant="fixed"),
    "dartree": System(_grown, variant="pruned"),
    "dartree_dspark": System(_grown, needs="markov", variant="pruned"),
    "dartree_dflash2": System(_grown, needs="selector", variant="pruned"),
}


def propose(system: System, draft: Draft, head: CorrectionHead, config: TreeConfig) -> Proposal:
    """Draws a system's tree."""
    candidates = min(config.candidates, draft.logits.shape[-1])
    return system.propose(draft, draft_block(draft.anchor, draft.hidden, draft.logits, candidates), head, config)


def next_slot_guesses(proposal: Proposal, path: list[int]) -> list[int]:
    """The system's first choice for every slot after the prefixes of ``path`` (the accepted tokens).

    Returns:
        One token per slot ``0..min(len(path), L - 1)``; guess ``d`` was made knowing ``path[:d]``.
    """
    head, block = proposal.head, proposal.block
    prepared = head.prepare(block)
    state = head.root_state(prepared)
    guesses: list[int] = []
    for slot in range(min(len(path) + 1, block.candidates.shape[1])):
        log_probs = corrected_log_probs(head, prepared, block, slot, state)[0, 0]
        guesses.append(int(block.candidates[0, slot, log_probs.argmax()]))
        if slot < len(path):
            choice = (block.candidates[0, slot] == path[slot]).int().argmax()
            state = head.advance(prepared, slot, state, choice.view(1, 1))
    return guesses


@dataclass
class HitRates:
    """How often the first choice for the next slot was the target's token, by what was accepted before it.

    *On the spine* all accepted tokens were first choices; *after a sibling* the last one was not, and those before it
    were.
    """

    spine_hits: int = 0
    spine_trials: int = 0
    sibling_hits: int = 0
    sibling_trials: int = 0

    def add(self, guesses: list[int], emitted: list[int]) -> None:
        """Counts one round: ``emitted`` are the accepted tokens and the target's own one behind them."""
        for slot, (guess, token) in enumerate(zip(guesses, emitted, strict=False)):
            right = [g == t for g, t in zip(guesses[:slot], emitted[:slot], strict=True)]
            if all(right):
                self.spine_trials += 1
                self.spine_hits += guess == token
            elif all(right[:-1]):
                self.sibling_trials += 1
                self.sibling_hits += guess == token

    @property
    def on_spine(self) -> float | None:
        return self.spine_hits / self.spine_trials if self.spine_trials else None

    @property
    def after_sibling(self) -> float | None:
        return self.sibling_hits / self.sibling_trials if self.sibling_trials else None


def empty_tree(device: torch.device) -> DraftTree:
    """The anchor alone: what decoding without speculation verifies."""
    return DraftTree(
        tokens=torch.empty(1, 0, dtype=torch.int64, device=device),
        parents=torch.zeros(1, 1, dtype=torch.int64, device=device),
        scores=torch.empty(1, 0, device=device),
    )
