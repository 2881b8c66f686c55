"""The trees on the device: what propose writes, and what the next step's verify, accept and commit read."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from vllm.v1.worker.gpu.input_batch import InputBatch

from vllm_dartree.tree import Accepted, DraftTree, Topology, keep_spine, topology


@dataclass
class TreeStep:
    """The verify rows of one step of the runner, ``N`` of them, over its ``R`` requests.

    Row ``i`` of a request is its anchor (0) or its node ``i``; a request without drafts has its anchor alone.
    """

    tokens: Tensor  # [N] int64, index of each row in the flat batch
    requests: Tensor  # [N] int64, its request's place in the batch
    rows: Tensor  # [N] int64, its row within the request
    first_rows: Tensor  # [R] int64, where each request's rows start among the N
    roots: Tensor  # [R] int64, position of the anchor
    num_nodes: Tensor  # [R] int64, nodes that can be walked; 0 while the request is in its prefill
    parents: Tensor  # [R, B + 1] int64
    topology: Topology
    verify_only: bool  # whether the flat batch holds nothing but verify rows
    accepted: Accepted | None = None  # set by the sampler

    def padded(self, values: Tensor) -> Tensor:
        """``[N, ...]`` values of the rows as ``[R, B + 1, ...]``, zero where a request has no such row."""
        padded = values.new_zeros(*self.parents.shape, *values.shape[1:])
        padded[self.requests, self.rows] = values
        return padded

    def part(self, requests: slice, rows: slice) -> "TreeStep":
        """The step of some of the requests, whose verify rows are ``rows`` of this one's."""
        if rows.start == 0 and rows.stop == self.tokens.shape[0]:
            return self
        return replace(
            self,
            tokens=self.tokens[rows],
            requests=self.requests[rows] - requests.start,
            rows=self.rows[rows],
            first_rows=self.first_rows[requests] - rows.start,
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
        counts = self.first_rows.diff(append=self.first_rows.new_full((1,), self.tokens.shape[0]))
        counts = counts.clamp(max=self.accepted.path.shape[1])
        places = torch.arange(counts.shape[0], device=counts.device)
        requests = torch.repeat_interleave(places, counts, output_size=num_rows)
        depths = torch.arange(num_rows, device=counts.device) - (counts.cumsum(0) - counts)[requests]
        return requests, depths

    def in_path_order(self) -> Tensor:
        """``[N]`` int64: for row ``d`` of a request, which row was accepted at depth ``d``; itself past the path."""
        path = self.accepted.path
        row = path[self.requests, self.rows.clamp(max=path.shape[1] - 1)]
        row = row.where((row >= 0) & (self.rows < path.shape[1]), self.rows)
        return self.first_rows[self.requests] + row


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

    def write(self, slots: Tensor, tree: DraftTree) -> DraftTree:
        """Stores the trees of the request slots ``slots`` (``[R]`` int64, -1 for padding).

        Returns:
            The trees as they will be verified: those of the slots in ``as_chain`` are reduced to their spine.
        """
        slots = slots.where(slots >= 0, self.parents.shape[0] - 1)
        tree = keep_spine(tree, topology(tree.parents, self.max_depth), self.as_chain[slots])
        shape = topology(tree.parents, self.max_depth)
        self.parents[slots] = tree.parents
        self.depths[slots] = shape.depths
        self.ancestors[slots] = shape.ancestors
        return tree

    def begin_step(self, input_batch: InputBatch, prefill_len: Tensor) -> TreeStep:
        """Reads the trees of a batch that has drafts, and moves its rows to their depth's positions in place.

        Args:
            input_batch: vLLM's ``InputBatch``; its ``positions`` are still sequential, and are the very buffer that
                the forward, a graph's replay included, reads.
            prefill_len: ``[max_num_reqs]``; the drafts of a request whose anchor lies below it are placeholders.
        """
        num_reqs, cumulative = input_batch.num_reqs, input_batch.cu_num_logits.long()
        tokens, rows = input_batch.logits_indices.long(), input_batch.expanded_local_pos.long()
        num_rows = cumulative.diff()
        requests = torch.repeat_interleave(
            torch.arange(num_reqs, device=tokens.device), num_rows, output_size=tokens.shape[0]
        )
        slots = input_batch.idx_mapping
        roots = input_batch.positions[tokens[cumulative[:-1]]]
        num_nodes = (num_rows - 1).where(roots >= prefill_len[slots], 0)
        self.step = TreeStep(
            tokens=tokens,
            requests=requests,
            rows=rows,
            first_rows=cumulative[:-1],
            roots=roots,
            num_nodes=num_nodes,
            parents=self.parents[slots],
            topology=Topology(self.depths[slots], self.ancestors[slots]),
            verify_only=input_batch.num_tokens == tokens.shape[0],
        )
        sequential = roots[requests] + rows
        by_depth = roots[requests] + self.step.topology.depths[requests, rows]
        input_batch.positions[tokens] = by_depth.where(rows <= num_nodes[requests], sequential)
        return self.step
