"""The trees on the device: what propose writes, and what the next step's verify, accept and commit read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vllm_dartree.kernels import use_triton
from vllm_dartree.kernels.plant import plant, plant_torch
from vllm_dartree.kernels.verify_rows import begin_rows, begin_rows_torch
from vllm_dartree.tree import Accepted, DraftTree, Topology

if TYPE_CHECKING:  # so that the benchmark of a round runs without vLLM
    from vllm.v1.worker.gpu.input_batch import InputBatch


@dataclass
class TreeStep:
    """The verify rows of one step of the runner, ``N`` of them, over its ``R`` requests.

    Row ``i`` of a request is its anchor (0) or its node ``i``; a request without drafts has its anchor alone.
    """

    tokens: Tensor  # [N] int64, index of each row in the flat batch
    requests: Tensor  # [N] int64, its request's place in the batch
    rows: Tensor  # [N] int64, its row within the request
    bounds: Tensor  # [R + 1] int64, where each request's rows start among the N, and N
    roots: Tensor  # [R] int64, position of the anchor
    num_nodes: Tensor  # [R] int64, nodes that can be walked; 0 while the request is in its prefill
    parents: Tensor  # [R, B + 1] int64
    topology: Topology
    verify_only: bool  # whether the flat batch holds nothing but verify rows
    accepted: Accepted | None = None  # set by the sampler

    @property
    def first_rows(self) -> Tensor:
        """``[R]`` int64."""
        return self.bounds[:-1]

    def padded(self, values: Tensor) -> Tensor:
        """``[N, ...]`` values of the rows as ``[R, B + 1, ...]``, zero where a request has no such row."""
        padded = values.new_zeros(*self.parents.shape, *values.shape[1:])
        padded[self.requests, self.rows] = values
        return padded

    def part(self, requests: slice, rows: slice) -> TreeStep:
        """The step of some of the requests, whose verify rows are ``rows`` of this one's."""
        if rows.start == 0 and rows.stop == self.tokens.shape[0]:
            return self
        return replace(
            self,
            tokens=self.tokens[rows],
            requests=self.requests[rows] - requests.start,
            rows=self.rows[rows],
            bounds=self.bounds[requests.start : requests.stop + 1] - rows.start,
            roots=self.roots[requests],
            num_nodes=self.num_nodes[requests],
            parents=self.parents[requests],
            topology=Topology(self.topology.depths[requests], self.topology.ancestors[requests]),
        )

    def path_rows(self, num_rows: int) -> tuple[Tensor, Tensor]:
        """Of each request as many rows as it has, but no more than a path can have: ``num_rows`` together.

        Returns:
            The request and the depth of each row, both ``[num_rows]`` int64.
        """
        counts = self.bounds.diff().clamp(max=self.accepted.path.shape[1])
        places = torch.arange(counts.shape[0], device=counts.device)
        requests = torch.repeat_interleave(places, counts, output_size=num_rows)
        depths = torch.arange(num_rows, device=counts.device) - (counts.cumsum(0) - counts)[requests]
        return requests, depths


class TreeState:
    """Trees by request slot, written at the end of propose.

    Args:
        max_num_reqs: request slots of the runner.
        budget: ``B``.
        max_depth: ``D``, deepest slot of a tree.
    """

    def __init__(self, max_num_reqs: int, budget: int, max_depth: int, device: torch.device) -> None:
        self.budget, self.max_depth = budget, max_depth
        rows = budget + 1
        # The last slot is nobody's: rows that pad a batch are written there.
        self.parents = torch.full((max_num_reqs + 1, rows), -1, dtype=torch.int64, device=device)
        self.parents[:, 0] = 0
        self.depths = torch.zeros(max_num_reqs + 1, rows, dtype=torch.int64, device=device)
        self.ancestors = torch.eye(rows, dtype=torch.bool, device=device).repeat(max_num_reqs + 1, 1, 1)
        # Slots whose requests are drafted as a chain.
        self.as_chain = torch.zeros(max_num_reqs + 1, dtype=torch.bool, device=device)
        self.step: TreeStep | None = None

    def write(self, slots: Tensor, tree: DraftTree) -> Tensor:
        """Stores the trees of the request slots ``slots`` (``[R]`` int64, -1 for padding).

        Returns:
            Their tokens ``[R, B]``, as they will be verified: the trees of the slots in ``as_chain`` are reduced to
            their spine.
        """
        place = plant if use_triton(slots.device) else plant_torch
        where = slots, self.as_chain, self.max_depth, self.parents, self.depths, self.ancestors
        return place(tree.tokens, tree.parents, *where)

    def begin_step(self, input_batch: InputBatch, prefill_len: Tensor) -> TreeStep:
        """Reads the trees of a batch that has drafts, and moves its rows to their depth's positions in place.

        Args:
            input_batch: vLLM's ``InputBatch``; its ``positions`` are still sequential, and are the very buffer that
                the forward, a graph's replay included, reads.
            prefill_len: ``[max_num_reqs]``; the drafts of a request whose anchor lies below it are placeholders.
        """
        tokens, bounds = input_batch.logits_indices.long(), input_batch.cu_num_logits.long()
        begin = begin_rows if use_triton(tokens.device) else begin_rows_torch
        trees = self.parents, self.depths, self.ancestors
        begun = begin(input_batch.positions, tokens, bounds, input_batch.idx_mapping, prefill_len, *trees)
        self.step = TreeStep(
            tokens=tokens,
            requests=begun.requests,
            rows=begun.rows,
            bounds=bounds,
            roots=begun.roots,
            num_nodes=begun.num_nodes,
            parents=begun.parents,
            topology=Topology(begun.depths, begun.ancestors),
            verify_only=input_batch.num_tokens == tokens.shape[0],
        )
        return self.step
