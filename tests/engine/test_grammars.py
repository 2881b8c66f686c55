"""Structured output on trees: the tokens are those without speculation, in fewer rounds than with chains."""

import pytest
import torch
from engine.engines import counted, dartree, engine, run, runner, tokens
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from vllm_dartree import grammars

pytestmark = pytest.mark.slow

ARRAY = {"type": "array", "items": {"enum": ["cold", "green", "warm"]}, "minItems": 2, "maxItems": 6}
GRAMMARS = (
    {"json": ARRAY},
    {"json_object": True},
    {"regex": r"( [a-z_]{2,9}| --[a-z]{3,8}-[a-z]{3,8}){3,9}"},
    {"choice": ["cold cable (next", "cold carrier", "quick router", "quiet"]},
)
GREEDY, WARM = {"temperature": 0, "max_tokens": 32}, {"temperature": 1.0, "seed": 3, "max_tokens": 20}


def answers(llm, prompts, **how) -> list[list[int]]:
    """Every grammar greedily, and warm beside other processing, with neighbours without one."""
    params = [
        SamplingParams(**ask, structured_outputs=StructuredOutputsParams(**grammar))
        for ask in (GREEDY, WARM | {"repetition_penalty": 1.3, "bad_words": ["cold-cable"]})
        for grammar in GRAMMARS
    ]
    params += [SamplingParams(**GREEDY), SamplingParams(**WARM)]
    return tokens(run(llm, prompts[1 : 2 * len(params) : 2], params, **how))


@pytest.fixture(scope="module")
def expected(prompts):
    return answers(engine(), prompts)


def test_trees_under_grammars(prompts, expected):
    rounds = {}
    for variant in ("pruned", "chain"):
        llm = engine(dartree(tree_variant=variant))
        with counted(llm) as drafts:
            assert answers(llm, prompts, arrive_every=1) == expected
        rounds[variant] = drafts.rounds
    assert rounds["pruned"] < rounds["chain"]
    assert not runner(engine(dartree())).speculator.trees.as_chain.any()


def test_more_requests_than_there_are_masks_for(prompts, expected, monkeypatch):
    """Only the best nodes of a tree get masks; the others are not accepted."""
    monkeypatch.setattr(grammars, "MAX_MASKS", 20)
    native, cut = grammars.fill_masks, []

    def watch(manager, native_bitmask, requests, request_ids, drafts, min_nodes):
        filled = native(manager, native_bitmask, requests, request_ids, drafts, min_nodes)
        cut.extend(drafts[name] for name in request_ids if drafts.get(name, [-1])[0] >= 0 and drafts[name][-1] < 0)
        return filled

    monkeypatch.setattr(grammars, "fill_masks", watch)
    assert answers(engine(dartree()), prompts) == expected
    assert cut
    for drafts in cut:
        known = sum(draft >= 0 for draft in drafts)
        assert 15 <= known <= 20 and all(draft == -1 for draft in drafts[known:])


def test_another_backend_of_grammars(prompts):
    settings = {"structured_outputs_config": {"backend": "guidance"}}
    expected = answers(engine(**settings), prompts)
    assert answers(engine(dartree(), **settings), prompts) == expected


def test_nodes_come_out_as_they_went_in():
    tokens, parents = torch.tensor([0, 151935, 7, 0]), torch.tensor([0, 64, 1, -1])
    pairs = [grammars.unpacked(node) for node in grammars.packed(tokens, parents).tolist()]
    assert pairs == list(zip(tokens.tolist(), parents.tolist(), strict=True))
