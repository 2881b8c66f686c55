"""Structured output on trees: a mask for each node, from the grammar as it stands behind the node's path.

vLLM's scheduler asks for the masks (``StructuredOutputManager.grammar_bitmask``) and takes drafts to be a chain. The
worker hands it each draft token with its parent's row, packed into one number, and the masks are filled along the tree.
A node that must not be accepted gets a mask without any token, which the worker looks for; its siblings live on.
"""

import functools
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager

logger = logging.getLogger("vllm.dartree")

PARENT_SHIFT = 32
# Nodes that get masks in a step; each takes the host microseconds or, inside of a string, up to a millisecond, while
# the target's forward runs. With more requests than they suffice for, only the best nodes of their trees can be
# accepted, but never fewer than the chain of a block has, so that it may be more in all.
MAX_MASKS = 256


def packed(token: Any, parent: Any) -> Any:
    """A node as one number, for ints and for int64 tensors; ``parent`` is a row, -1 for a dead node."""
    return token | (parent + 1) << PARENT_SHIFT


def unpacked(draft: int) -> tuple[int, int]:
    """The token and the parent's row of ``packed``."""
    return draft & (1 << PARENT_SHIFT) - 1, (draft >> PARENT_SHIFT) - 1


def fill_masks(
    manager: "StructuredOutputManager",
    native: Any,
    requests: "Mapping[str, Request]",
    request_ids: list[str],
    drafts: dict[str, list[int]],
    min_nodes: int,
) -> "np.ndarray | None":
    """The masks of all verify rows of the requests, laid out as ``native`` lays out those of chains.

    Args:
        manager: vLLM's.
        native: its own ``grammar_bitmask``.
        requests: by id.
        request_ids: those with a grammar, in the order of the masks.
        drafts: packed nodes by request, or -1 where they are not known. Nodes that get no mask are set to -1 in place,
            so that the worker accepts none of them.
        min_nodes: of each request's tree that get masks, however many requests there are.
    """
    if not request_ids:
        return None
    if manager._grammar_bitmask is None:
        of_one = native(manager, requests, request_ids[:1], {})  # allocates them, and shows how they are laid out
        manager.dartree_stride = len(of_one) if len(of_one) > 1 else None
    max_nodes = max(min_nodes, MAX_MASKS // len(request_ids))
    first_row = 0
    for name in request_ids:
        nodes = drafts.get(name, [])
        nodes[max_nodes:] = [-1] * len(nodes[max_nodes:])
        _Tree(manager, requests[name], first_row, [node for node in nodes if node >= 0]).fill()
        # Since vLLM 0.33 each request has as many masks as it could have drafts, as is this method.
        first_row += manager.dartree_stride or 1 + len(nodes)
    return manager._grammar_bitmask[:first_row].numpy()


def _ends_of_reasoning(reasoner: Any) -> frozenset[int] | None:
    """Tokens each of which ends the reasoning wherever it stands; None: this parser looks at more of the text.

    What such a parser says of a path need not hold for longer ones, and to ask it about each node would be dear.
    """
    from vllm.parser.engine.adapters import ParserEngineReasoningAdapter
    from vllm.reasoning.basic_parsers import BaseThinkingReasoningParser

    if isinstance(reasoner, ParserEngineReasoningAdapter):
        return reasoner.reasoning_end_token_ids or None
    by_token = BaseThinkingReasoningParser.is_reasoning_end_streaming
    if getattr(type(reasoner), "is_reasoning_end_streaming", None) is by_token:
        return frozenset([reasoner.end_token_id])
    return None


@functools.cache
def _tell_of(parser: str) -> None:
    logger.warning(
        "The reasoning parser %s looks at more than single tokens, so no drafts are accepted while a request with a "
        "grammar reasons",
        parser,
    )


class _Tree:
    """The masks of one request's tree.

    Args:
        manager: vLLM's.
        request: vLLM's.
        first_row: of the request's masks.
        nodes: packed.
    """

    def __init__(
        self, manager: "StructuredOutputManager", request: "Request", first_row: int, nodes: list[int]
    ) -> None:
        self.manager, self.request, self.first_row = manager, request, first_row
        self.grammar = request.structured_output_request.grammar
        self.tokens: dict[int, int] = {}
        self.children: dict[int, list[int]] = {}
        for row, (token, parent) in enumerate(map(unpacked, nodes), start=1):
            if parent >= 0:
                self.tokens[row] = token
                self.children.setdefault(parent, []).append(row)
        self.ends_of_reasoning: frozenset[int] = frozenset()

    def fill(self) -> None:
        bounds = self.manager._get_constraint_bounds(self.request, ())
        if bounds.constraint_start == 0:
            self._fill(0, is_bound=True)
            self._fill_below(0, [], bounds)
            return
        self._fill(0, is_bound=False)
        reasoner = self.manager._get_reasoner(self.request)
        ends = _ends_of_reasoning(reasoner)
        if ends is None:
            _tell_of(type(reasoner).__name__)
            for child in self.children.get(0, ()):
                self._forbid(child)
            return
        self.ends_of_reasoning = ends
        self._fill_below(0, [], None)

    def _bounds(self, path: list[int]) -> Any | None:
        """vLLM's ``ConstraintBounds``: where on the path the grammar begins, after reasoning; None: behind it.

        The path without its last token was reasoning.
        """
        if path[-1] not in self.ends_of_reasoning:
            return None
        bounds = self.manager._get_constraint_bounds(self.request, path)
        return bounds if bounds.constraint_start <= len(path) else None

    def _fill_below(self, row: int, path: list[int], bounds: Any | None) -> None:
        """Fills the masks of the row's children and of all below them; the grammar stands behind ``path``.

        ``bounds`` are None while the request reasons.
        """
        for child in self.children.get(row, ()):
            extended = [*path, self.tokens[child]]
            here = self._bounds(extended) if bounds is None else bounds
            consumed = here is not None and len(path) >= here.grammar_start and not self.grammar.is_terminated()
            if consumed and not self._advance(extended[-1]):
                self._forbid(child)
                continue
            self._fill(child, here is not None)
            self._fill_below(child, extended, here)
            if consumed:
                self.grammar.rollback(1)

    def _advance(self, token: int) -> bool:
        """Moves the grammar on, unless it forbids the token or ends with it.

        Who chooses such a token emits it all the same, as the last one of a round: the scheduler hands a round's tokens
        to the grammar at once, and not every grammar goes on behind its end.
        """
        if not self.grammar.validate_tokens([token]):
            return False
        if not self.grammar.accept_tokens(self.request.request_id, [token]):
            return False
        if self.grammar.is_terminated():
            self.grammar.rollback(1)
            return False
        return True

    def _fill(self, row: int, is_bound: bool) -> None:
        entry = self.grammar, self.first_row + row, is_bound
        if hasattr(self.manager, "_masked_reasoning_ends"):  # since vLLM 0.33
            entry += (() if is_bound else self.manager._masked_reasoning_ends(self.request),)
        self.manager._fill_bitmasks((entry,))

    def _forbid(self, row: int) -> None:
        self.manager._grammar_bitmask[self.first_row + row].fill_(0)
