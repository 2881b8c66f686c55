"""The Domino head: a GRU over the drafted tokens and a low-rank bias from its state and the slot's hidden state."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vllm_dartree.heads.spec import ConfigKeys, DrafterSpec
from vllm_dartree.heads.tensors import take
from vllm_dartree.tree import CorrectionHead, DraftBlock


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

    def num_weights(self, hidden: int, vocabulary: int) -> int:
        state, emb = self.gru_hidden_dim, self.emb_dim
        return 3 * state * (hidden + state) + emb * (hidden + state) + vocabulary * emb


class _Prepared(NamedTuple):
    block: DraftBlock
    projected_hidden: Tensor  # [R, L, emb_dim], Wz z of every slot
    candidate_weight: Tensor  # [R, L, K, emb_dim], rows of W2


class DominoHead(CorrectionHead):
    """``score = W2[candidate] . SiLU(Wz z + Ws state)``; the state is a GRU's, ``[R, F, G]``.

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
        self.state_weight = take(tensors, "prefix_gru.weight_hh_l0", (3 * state_size, state_size))
        biases = ("prefix_gru.bias_ih_l0", "prefix_gru.bias_hh_l0")
        self.biases = (None, None)
        if any(name in tensors for name in biases):
            self.biases = tuple(take(tensors, name, (3 * state_size,)) for name in biases)
        hidden_size = self.input_weight.shape[1]
        projection = take(tensors, "embed_proj.0.weight", (emb_dim, hidden_size + state_size))
        self.hidden_projection, self.state_projection = projection.split([hidden_size, state_size], dim=1)
        self.output_weight = take(tensors, "embed_proj.2.weight", (None, emb_dim))

    def _gru(self, tokens: Tensor, state: Tensor) -> Tensor:
        # The plain cell: the fused GRU of cuDNN would repack its weights at every single step.
        inputs = self.embed(tokens).flatten(0, 1)
        return torch.gru_cell(
            inputs, state.flatten(0, 1), self.input_weight, self.state_weight, *self.biases
        ).unflatten(0, state.shape[:2])

    def prepare(self, block: DraftBlock) -> _Prepared:
        return _Prepared(block, block.hidden @ self.hidden_projection.mT, self.output_weight[block.candidates])

    def root_state(self, prepared: _Prepared) -> Tensor:
        anchor = prepared.block.anchor[:, None]
        zeros = prepared.projected_hidden.new_zeros(anchor.shape[0], 1, self.state_weight.shape[1])
        return self._gru(anchor, zeros)

    def score(self, prepared: _Prepared, slot: int, state: Tensor) -> Tensor:
        if slot < self.pure_draft_prefix_len:
            return torch.zeros(1, 1, 1, device=state.device)
        activated = F.silu(prepared.projected_hidden[:, slot, None] + state @ self.state_projection.mT)
        return (activated @ prepared.candidate_weight[:, slot].mT).float()

    def advance(self, prepared: _Prepared, slot: int, state: Tensor, choice: Tensor) -> Tensor:
        return self._gru(prepared.block.candidates[:, slot].gather(1, choice), state)
