"""Random drafts for the property tests: all heads, ties, extreme logits, slots that no candidate can fill."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from vllm_dartree.heads import KINDS, DrafterSpec
from vllm_dartree.tree import CorrectionHead, DraftBlock, draft_block

HEADS = ("marginal", "markov", "selector", "domino")


def spec_of(head: str, **changes: object) -> DrafterSpec:
    sizes = {
        "domino": {"gru_hidden_dim": 3, "emb_dim": 2},
        "markov": {"markov_rank": 2},
        "selector": {"selector_rank": 2, "top_k": 8},
    }
    fields = {"block_size": 4, "mask_token_id": 0, "target_layer_ids": (0,)} | sizes.get(head, {})
    return KINDS[head](**fields | changes)


def random_head(kind: str, vocab: int, hidden: int, weights, **spec_changes: object) -> CorrectionHead:
    """A head with weights drawn by ``weights(*shape)``."""
    spec = spec_of(kind, **spec_changes)
    embedding, tensors = weights(vocab, hidden), {}
    match kind:
        case "markov":
            tensors = {f"markov_head.markov_{name}.weight": weights(vocab, 2) for name in ("w1", "w2")}
        case "selector":
            tensors = {
                "candidate_selector.predecessor_codebook": weights(vocab, 2),
                "candidate_selector.successor_codebook": weights(vocab, 2),
                "candidate_selector.hidden_projection.weight": weights(2, hidden),
            }
        case "domino":
            state, emb = spec.gru_hidden_dim, spec.emb_dim
            tensors = {
                "prefix_gru.weight_ih_l0": weights(3 * state, hidden),
                "prefix_gru.weight_hh_l0": weights(3 * state, state),
                "embed_proj.0.weight": weights(emb, hidden + state),
                "embed_proj.2.weight": weights(vocab, emb),
            }
    return spec.make_head(tensors, lambda tokens: embedding[tokens])


@dataclass
class Draft:
    """One random round: ``R`` requests, ``L`` slots, ``K`` candidates out of ``V`` tokens."""

    kind: str
    head: CorrectionHead
    block: DraftBlock
    logits: Tensor  # [R, L, V]
    exact: bool  # batched and single scores agree to the bit

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.block.candidates.shape

    def request(self, r: int) -> DraftBlock:
        block = self.block
        return DraftBlock(*(x[r : r + 1] for x in (block.anchor, block.hidden, block.candidates, block.base)))


@st.composite
def drafts(draw, kinds=HEADS, max_slots=6, max_candidates=8, min_candidates=1, full_vocab=False) -> Draft:
    kind = draw(st.sampled_from(kinds))
    requests, slots = draw(st.integers(1, 4)), draw(st.integers(1, max_slots))
    candidates = draw(st.integers(min_candidates, max_candidates))
    vocab = candidates if full_vocab else candidates + draw(st.integers(0, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    tied = draw(st.booleans())
    scale = draw(st.sampled_from([0.0, 1.0, 4.0, 1e4, 1e30]))
    impossible = draw(st.sampled_from([0.0, 0.0, 0.3, 1.0]))

    def weights(*shape: int) -> Tensor:
        if tied:
            return torch.randint(-1, 2, shape, generator=generator).float()
        return torch.randn(shape, generator=generator)

    logits = weights(requests, slots, vocab) * scale
    logits[torch.rand(logits.shape, generator=generator) < impossible] = float("-inf")
    anchor = torch.randint(vocab, (requests,), generator=generator)
    hidden = weights(requests, slots, 3)
    prefix = draw(st.integers(0, 2))
    head = random_head(kind, vocab, 3, weights, **({"pure_draft_prefix_len": prefix} if kind == "domino" else {}))
    # Dot products of whole numbers do not depend on the order of summation; a GRU's exponentials always may differ.
    exact = kind == "marginal" or (tied and kind != "domino")
    return Draft(kind, head, draft_block(anchor, hidden, logits, candidates), logits, exact)
