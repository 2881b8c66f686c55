"""The Domino head: a GRU over the drafted tokens and a low-rank bias from its state and the slot's hidden state."""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_dartree.heads.spec import ConfigKeys, DrafterSpec
from vllm_dartree.heads.tensors import take
from vllm_dartree.kernels import use_triton
from vllm_dartree.kernels.domino_step import best_children, gru_step, gru_step_torch
from vllm_dartree.tree import Branches, CorrectionHead, DraftBlock


@dataclass(frozen=True)
class DominoSpec(DrafterSpec):
    gru_hidden_dim: int = 0
    emb_dim: int = 0
    pure_draft_prefix_len: int = 0

    head = "domino"
    anchor_key = "shift_label"
    tensor_prefixes = ("prefix_gru.", "embed_proj.")

    @classmethod
    def claims(cls, keys: ConfigKeys) -> bool:
        return keys.get("projector_type") in ("domino", "causal_v5")

    @classmethod
    def own_fields(cls, keys: ConfigKeys) -> dict[str, Any]:
        fields = {
            name: keys.integer(name, minimum=1, needed_by="the Domino head") for name in ("gru_hidden_dim", "emb_dim")
        }
        if keys.get("pure_draft_prefix_len") is not None:
            fields["pure_draft_prefix_len"] = keys.integer(
                "pure_draft_prefix_len", minimum=0, needed_by="the Domino head"
            )
        return fields

    def make_head(self, tensors: Mapping[str, Tensor], embed: Callable[[Tensor], Tensor]) -> "DominoHead":
        return DominoHead(self, tensors, embed)

    def tensor_shapes(self, hidden: int, vocabulary: int, names: Collection[str] = ()) -> dict[str, tuple[int, ...]]:
        state, emb = self.gru_hidden_dim, self.emb_dim
        shapes = {
            "prefix_gru.weight_ih_l0": (3 * state, hidden),
            "prefix_gru.weight_hh_l0": (3 * state, state),
            "embed_proj.0.weight": (emb, hidden + state),
            "embed_proj.2.weight": (vocabulary, emb),
        }
        biases = dict.fromkeys(("prefix_gru.bias_ih_l0", "prefix_gru.bias_hh_l0"), (3 * state,))
        return shapes | (biases if not biases.keys().isdisjoint(names) else {})

    def num_weights(self, hidden: int, vocabulary: int) -> int:
        return sum(map(math.prod, self.tensor_shapes(hidden, vocabulary).values()))


class _Prepared(NamedTuple):
    block: DraftBlock
    projected_hidden: Tensor  # [R, L, emb_dim], Wz z of every slot
    candidate_weight: Tensor | None  # [R, L, K, emb_dim], rows of W2; the kernel reads them where they are


class DominoHead(CorrectionHead):
    """``score = W2[candidate] . SiLU(Wz z + Ws state)``; the state is a GRU's, ``[R, F, G]``.

    The state is a row ``[state | Ws state | gates]`` of ``G + emb_dim + 3G`` numbers, the last two being its products
    with all that it will be multiplied with, in one product: those of the branches that are not followed go to waste,
    but there are as many rows before the choice as after it.

    ``embed_proj.0.weight`` is ``[Wz | Ws]`` and ``embed_proj.2.weight`` is ``W2``. The first
    ``pure_draft_prefix_len`` slots get no bias, while the state advances over them all the same.

    Args:
        spec: of the checkpoint.
        tensors: ``prefix_gru.*`` and ``embed_proj.*``; the GRU's biases are optional.
        embed: the target's token embedding, ids ``[...]`` to ``[..., H]``.

    Raises:
        HeadTensorError: a tensor is missing or has a wrong shape.
    """

    def __init__(self, spec: DominoSpec, tensors: Mapping[str, Tensor], embed: Callable[[Tensor], Tensor]) -> None:
        state_size, emb_dim = spec.gru_hidden_dim, spec.emb_dim
        self.embed, self.pure_draft_prefix_len = embed, spec.pure_draft_prefix_len
        self.input_weight = take(tensors, "prefix_gru.weight_ih_l0", (3 * state_size, None))
        gate_weight = take(tensors, "prefix_gru.weight_hh_l0", (3 * state_size, state_size))
        biases = ("prefix_gru.bias_ih_l0", "prefix_gru.bias_hh_l0")
        self.input_bias = gate_bias = None
        if any(name in tensors for name in biases):
            self.input_bias, gate_bias = (take(tensors, name, (3 * state_size,)) for name in biases)
        hidden_size = self.input_weight.shape[1]
        projection = take(tensors, "embed_proj.0.weight", (emb_dim, hidden_size + state_size))
        self.hidden_projection, state_projection = projection.split([hidden_size, state_size], dim=1)
        self.output_weight = take(tensors, "embed_proj.2.weight", (None, emb_dim))
        self.state_size, self.emb_dim = state_size, emb_dim
        self.state_weight = torch.cat([state_projection, gate_weight])  # [emb_dim + 3G, G]
        # The row of the state before the anchor, which is zero.
        self.first_row = self.state_weight.new_zeros(state_size + emb_dim + 3 * state_size)
        if gate_bias is not None:
            self.first_row[-3 * state_size :] = gate_bias
        self.state_bias = None if gate_bias is None else self.first_row[state_size:]

    @torch.no_grad()  # the target's embedding may ask for gradients
    def _step(self, tokens: Tensor, state: Tensor, branch: Tensor) -> Tensor:
        """The states after ``tokens`` (``[R, W]``), each appended to one of the branches of ``state``."""
        # The plain cell: the fused GRU of cuDNN would repack its weights at every single step.
        inputs = F.linear(self.embed(tokens), self.input_weight, self.input_bias)  # [R, W, 3G]
        rows = inputs.new_empty(*tokens.shape, state.shape[-1])
        step = gru_step if use_triton(inputs.device) else gru_step_torch
        step(inputs, state, branch, rows[..., : self.state_size])
        states, products = rows.flatten(0, 1).tensor_split([self.state_size], dim=1)
        if self.state_bias is None:
            torch.mm(states, self.state_weight.mT, out=products)
        else:
            torch.addmm(self.state_bias, states, self.state_weight.mT, out=products)
        return rows

    def prepare(self, block: DraftBlock) -> _Prepared:
        projected = block.hidden @ self.hidden_projection.mT
        return _Prepared(
            block, projected, None if use_triton(projected.device) else self.output_weight[block.candidates]
        )

    def root_state(self, prepared: _Prepared) -> Tensor:
        anchor = prepared.block.anchor[:, None]
        return self._step(anchor, self.first_row.expand(anchor.shape[0], 1, -1), torch.zeros_like(anchor))

    def score(self, prepared: _Prepared, slot: int, state: Tensor) -> Tensor:
        if slot < self.pure_draft_prefix_len:
            return torch.zeros(1, 1, 1, device=state.device)
        projected = state[..., self.state_size : self.state_size + self.emb_dim]
        activated = F.silu(prepared.projected_hidden[:, slot, None] + projected)
        weight = prepared.candidate_weight
        weight = self.output_weight[prepared.block.candidates[:, slot]] if weight is None else weight[:, slot]
        return (activated @ weight.mT).float()

    def advance(self, prepared: _Prepared, slot: int, state: Tensor, choice: Tensor) -> Tensor:
        own = torch.arange(state.shape[1], device=state.device).expand_as(choice)
        return self._step(prepared.block.candidates[:, slot].gather(1, choice), state, own)

    def grow(
        self, prepared: _Prepared, block: DraftBlock, slot: int, state: Tensor, scores: Tensor, width: int
    ) -> Branches:
        if not use_triton(state.device):
            return super().grow(prepared, block, slot, state, scores, width)
        return Branches(
            *best_children(
                prepared.projected_hidden[:, slot],
                state[..., self.state_size : self.state_size + self.emb_dim],
                self.output_weight,
                block.candidates[:, slot],
                block.base[:, slot],
                scores,
                width,
                slot >= self.pure_draft_prefix_len,
            )
        )

    def follow(self, prepared: _Prepared, slot: int, state: Tensor, branches: Branches) -> Tensor:
        return self._step(branches.tokens, state, branches.parents)
