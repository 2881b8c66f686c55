"""Each head against its definition written with torch's own modules, and its checkpoint errors."""

import re
from dataclasses import dataclass

import pytest
import torch
from drafts import spec_of
from torch import nn

from vllm_dartree.engine import draft_models
from vllm_dartree.heads import KINDS, DominoHead, DrafterConfigError, DrafterSpec, MarkovHead, ScoredBlock, SelectorHead
from vllm_dartree.heads.tensors import HeadTensorError
from vllm_dartree.tree import draft_block

VOCAB, HIDDEN, SLOTS, CANDIDATES = 11, 6, 4, 5


def _block(seed: int = 0):
    torch.manual_seed(seed)
    anchor, logits = torch.tensor([3, 7]), torch.randn(2, SLOTS, VOCAB)
    return draft_block(anchor, torch.randn(2, SLOTS, HIDDEN), logits, CANDIDATES)


def _walk_head(head, block, choices):
    """Bias of every slot along one path of candidate indices, ``[R, L, K]``."""
    prepared, biases = head.prepare(block), []
    state = head.root_state(prepared)
    for slot, choice in enumerate(choices):
        biases.append(head.score(prepared, slot, state).expand(2, 1, CANDIDATES)[:, 0])
        state = head.advance(prepared, slot, state, torch.full((2, 1), choice))
    return torch.stack(biases, dim=1)


def _path(block, choices):  # [R, 1 + L]: the anchor and the chosen tokens
    tokens = [block.candidates[:, slot, choice] for slot, choice in enumerate(choices)]
    return torch.stack([block.anchor, *tokens], dim=1)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("prefix", [0, 1, 3])
def test_domino_is_a_gru_and_a_projection_of_hidden_and_state(bias, prefix):
    block, choices = _block(), (0, 3, 1, 4)
    gru = nn.GRU(HIDDEN, 8, bias=bias, batch_first=True)
    project = nn.Sequential(nn.Linear(HIDDEN + 8, 3, bias=False), nn.SiLU(), nn.Linear(3, VOCAB, bias=False))
    embedding = nn.Embedding(VOCAB, HIDDEN)
    spec = spec_of("domino", gru_hidden_dim=8, emb_dim=3, pure_draft_prefix_len=prefix)
    tensors = {f"prefix_gru.{name}": tensor for name, tensor in gru.state_dict().items()}
    tensors |= {f"embed_proj.{name}": tensor for name, tensor in project.state_dict().items()}
    actual = _walk_head(DominoHead(spec, tensors, embedding), block, choices)

    states, _ = gru(embedding(_path(block, choices)[:, :-1]))
    expected = project(torch.cat([block.hidden, states], dim=-1)).gather(-1, block.candidates)
    expected[:, :prefix] = 0
    torch.testing.assert_close(actual, expected)


def test_markov_is_a_low_rank_bias_from_the_token_before():
    block, choices = _block(1), (2, 2, 0, 1)
    w1, w2 = torch.randn(VOCAB, 3), torch.randn(VOCAB, 3)
    tensors = {"markov_head.markov_w1.weight": w1, "markov_head.markov_w2.weight": w2}
    head = spec_of("markov", markov_rank=3, logit_scale=0.5).make_head(tensors, None)
    expected = (0.5 * (w1 @ w2.T)[_path(block, choices)[:, :-1]]).gather(-1, block.candidates)
    torch.testing.assert_close(_walk_head(head, block, choices), expected)
    capped = MarkovHead(w1.__getitem__, w2.__getitem__, soft_cap=0.7)
    torch.testing.assert_close(_walk_head(capped, block, choices), 0.7 * (2 * expected / 0.7).tanh())


def test_selector_is_dflash2s_modulated_table():
    block, choices = _block(2), (1, 0, 4, 3)
    predecessor, successor, projection = torch.randn(VOCAB, 3), torch.randn(VOCAB, 3), torch.randn(3, HIDDEN)
    head = spec_of("selector", selector_rank=3).make_head(
        {
            "candidate_selector.predecessor_codebook": predecessor,
            "candidate_selector.successor_codebook": successor,
            "candidate_selector.hidden_projection.weight": projection,
        },
        None,
    )
    modulation = block.hidden @ projection.T  # [R, L, rank]
    scores = (predecessor[_path(block, choices)[:, :-1]] * modulation) @ successor.T  # [R, L, V]
    torch.testing.assert_close(_walk_head(head, block, choices), scores.gather(-1, block.candidates))


def test_a_scored_block_brings_its_own_table():
    block, choices = _block(3), (1, 0, 4, 3)
    table = torch.randn(2, SLOTS, CANDIDATES, CANDIDATES)
    scored = ScoredBlock(block.anchor, block.hidden, block.candidates, block.base, table)
    parents = torch.tensor([0, *choices[:-1]])  # the rows of the first slot's table are alike
    torch.testing.assert_close(_walk_head(SelectorHead(), scored, choices), table[:, torch.arange(SLOTS), parents])


def test_missing_and_misshapen_tensors_are_named():
    spec = spec_of("domino")
    tensors = {
        "prefix_gru.weight_ih_l0": torch.zeros(9, HIDDEN),
        "prefix_gru.weight_hh_l0": torch.zeros(9, 3),
        "embed_proj.0.weight": torch.zeros(2, HIDDEN + 3),
        "embed_proj.2.weight": torch.zeros(VOCAB, 2),
    }
    DominoHead(spec, tensors, nn.Embedding(VOCAB, HIDDEN))
    for name in tensors:
        with pytest.raises(HeadTensorError, match=re.escape(f"no tensor '{name}'")):
            DominoHead(spec, {n: t for n, t in tensors.items() if n != name}, nn.Embedding(VOCAB, HIDDEN))
        with pytest.raises(HeadTensorError, match=re.escape(f"'{name}' has shape")):
            DominoHead(spec, tensors | {name: torch.zeros(1, 1)}, nn.Embedding(VOCAB, HIDDEN))
    with pytest.raises(HeadTensorError, match=r"no tensor 'prefix_gru\.bias_hh_l0'"):
        DominoHead(spec, tensors | {"prefix_gru.bias_ih_l0": torch.zeros(9)}, nn.Embedding(VOCAB, HIDDEN))


NESTED = {"mask_token_id": 1, "target_layer_ids": [1, 2]}


def test_spec_reads_both_spellings_and_both_places_of_domino_keys():
    for projector in ("domino", "causal_v5"):
        inside = {"projector_type": projector, "gru_hidden_dim": 8, "emb_dim": 4, "pure_draft_prefix_len": 1}
        spec = DrafterSpec.from_config({"block_size": 16, "dflash_config": NESTED | inside})
        assert (spec.head, spec.gru_hidden_dim, spec.emb_dim, spec.pure_draft_prefix_len) == ("domino", 8, 4, 1)
        assert (spec.num_slots, spec.num_query_rows, spec.first_slot_row) == (15, 16, 1)
        outside = {"block_size": 16, "gru_hidden_dim": 8, "emb_dim": 4}
        shifted = NESTED | {"projector_type": projector, "shift_label": True}
        spec = DrafterSpec.from_config(outside | {"dflash_config": shifted})
        assert (spec.gru_hidden_dim, spec.emb_dim, spec.pure_draft_prefix_len) == (8, 4, 0)
        assert (spec.num_slots, spec.num_query_rows, spec.first_slot_row) == (16, 16, 0)


def test_spec_tells_the_heads_apart():
    config = {"block_size": 8, "dflash_config": NESTED}
    assert DrafterSpec.from_config(config).head == "marginal"
    markov = DrafterSpec.from_config(config | {"markov_rank": 32})
    assert (markov.head, markov.num_slots) == ("markov", 8)
    assert DrafterSpec.from_config(config | {"markov_rank": 32, "sample_from_anchor": False}).num_slots == 7
    selector = config | {"dflash_config": NESTED | {"selector_top_k": 4, "selector_rank": 2}}
    assert (DrafterSpec.from_config(selector).head, DrafterSpec.from_config(selector).top_k) == ("selector", 4)
    lilicorr = config | {"dflash_config": NESTED | {"lilicorr_candidate_topk": 8}}
    assert (DrafterSpec.from_config(lilicorr).head, DrafterSpec.from_config(lilicorr).top_k) == ("lilicorr", 8)
    assert DrafterSpec.from_config(config | {"markov_rank": 32, "dspark_draft_topk": 16}).top_k == 16


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block_size": None}, "no 'block_size'"),
        ({"block_size": 1}, "block_size=1; it must be an integer >= 2"),
        ({"dflash_config": {"target_layer_ids": [1]}}, "no 'mask_token_id'"),
        ({"dflash_config": {"mask_token_id": 1}}, "no 'target_layer_ids'"),
        ({"dflash_config": NESTED | {"target_layer_ids": [-1]}}, "target_layer_ids=\\[-1\\]"),
        ({"dflash_config": NESTED | {"target_layer_ids": [True]}}, "target_layer_ids=\\[True\\]"),
        ({"dflash_config": NESTED | {"target_layer_ids": 3}}, "target_layer_ids=3; it must list"),
        ({"dflash_config": [1]}, "dflash_config=\\[1\\]; it must be an object"),
        ({"logit_scale": 10**400}, "it must be a number"),
        ({"logit_scale": "x"}, "logit_scale='x'; it must be a number"),
        ({"dflash_config": NESTED | {"projector_type": "domino", "emb_dim": 4}}, "no 'gru_hidden_dim'"),
        ({"dflash_config": NESTED | {"projector_type": "xpress"}}, "projector_type='xpress'"),
    ],
)
def test_spec_errors_name_the_key(changes, words):
    with pytest.raises(DrafterConfigError, match=words):
        DrafterSpec.from_config({"block_size": 16, "dflash_config": NESTED} | changes)


def test_a_new_kind_is_found_where_it_is_defined():
    @dataclass(frozen=True)
    class EchoSpec(DrafterSpec):
        head = "echo"

        @classmethod
        def claims(cls, keys):
            return keys.get("echo_length") is not None

    class Echo(draft_models.DraftModel):
        name, heads, architectures, method = "Echo", ("echo",), ("EchoDraftModel",), "dflash"

    try:
        config = {"block_size": 8, "dflash_config": NESTED, "echo_length": 3, "architectures": ["EchoDraftModel"]}
        spec = DrafterSpec.from_config(config)
        assert type(spec) is EchoSpec
        assert draft_models.kind_of(spec) is Echo
        assert draft_models.refusal(config) is None
    finally:
        del KINDS["echo"]
        draft_models.KINDS.remove(Echo)
    assert "EchoDraftModel" in draft_models.refusal(config)
