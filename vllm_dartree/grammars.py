"""Structured output on trees: a mask for each node, from the grammar as it stands behind the node's path.

vLLM's scheduler asks for the masks (``StructuredOutputManager.grammar_bitmask``) and takes drafts to be a chain. The
worker hands it each draft token with its parent's row, packed into one number, and the masks are filled along the tree.
Drafts are not checked before they are verified, as those of chains are: where the grammar forbids a node, its parent's
mask keeps the target from choosing it, and its siblings live on.
"""

from collections.abc import Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from vllm.v1.request import Request
    from vllm.v1.structured_output import StructuredOutputManager

PARENT_SHIFT = 32
# Masks that are filled in a step at most, some ten microseconds each on the host, while the target's forward runs. With
# more requests their trees are cut to their best nodes, but never to fewer than the chain of a block has.
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
    # Without known drafts vLLM fills a request's first mask, and lets all others pass.
    bitmask = native(manager, requests, request_ids, {name: [-1] * len(drafts.get(name, ())) for name in request_ids})
    if bitmask is None:
        return None
    num_rows = [1 + len(drafts.get(name, ())) for name in request_ids]
    first_rows = [0, *accumulate(num_rows)]
    if bitmask.shape[0] != first_rows[-1]:  # vLLM 0.33: as many rows for each
        stride = bitmask.shape[0] // len(request_ids)
        first_rows = [number * stride for number in range(len(request_ids))]
    max_nodes = max(min_nodes, MAX_MASKS // len(request_ids))
    for name, first_row in zip(request_ids, first_rows, strict=False):
        nodes = drafts.get(name, [])
        if nodes and nodes[0] >= 0:
            nodes[max_nodes:] = [-1] * len(nodes[max_nodes:])
            _Tree(manager, requests[name], first_row, nodes[:max_nodes]).fill()
    return bitmask


class _Tree:
    """The masks of one request's tree.

    Args:
        manager: vLLM's.
        request: vLLM's.
        first_row: of the request's masks; it is filled already.
        nodes: packed.
    """

    def __init__(
        self, manager: "StructuredOutputManager", request: "Request", first_row: int, nodes: list[int]
    ) -> None:
        self.manager, self.request, self.first_row = manager, request, first_row
        self.grammar = request.structured_output_request.grammar
        self.tokens = {}
        self.children: dict[int, list[int]] = {}
        for row, (token, parent) in enumerate(map(unpacked, nodes), start=1):
            if parent >= 0:
                self.tokens[row] = token
                self.children.setdefault(parent, []).append(row)

    def fill(self) -> None:
        self._fill_below(0, [], self._bounds([]))

    def _bounds(self, path: list[int]) -> Any | None:
        """vLLM's ``ConstraintBounds``: where on the path the grammar begins, after reasoning; None: behind it."""
        bounds = self.manager._get_constraint_bounds(self.request, path)
        return bounds if bounds.constraint_start <= len(path) else None

    def _fill_below(self, row: int, path: list[int], bounds: Any | None) -> None:
        """Fills the masks of the row's children and of all below them; the grammar stands behind ``path``."""
        for child in self.children.get(row, ()):
            extended = [*path, self.tokens[child]]
            here = self._bounds(extended) if bounds is None else bounds
            consumed = here is not None and len(path) >= here.grammar_start and not self.grammar.is_terminated()
            if consumed:
                # The target cannot choose what the grammar forbids, so nobody gets to such a node.
                if not self.grammar.validate_tokens(extended[-1:]):
                    continue
                self.grammar.accept_tokens(self.request.request_id, extended[-1:])
            self._fill(child, here is not None)
            self._fill_below(child, extended, here)
            if consumed:
                self.grammar.rollback(1)

    def _fill(self, row: int, is_bound: bool) -> None:
        entry = self.grammar, self.first_row + row, is_bound
        if hasattr(self.manager, "_masked_reasoning_ends"):  # since vLLM 0.33
            entry += (() if is_bound else self.manager._masked_reasoning_ends(self.request),)
        self.manager._fill_bitmasks((entry,))
