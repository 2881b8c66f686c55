"""Structured output on trees: the tokens are those without speculation, in fewer rounds than with chains."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from engine.engines import counted, dartree, engine, run, runner, tokens
from engine.extensions import END_OF_THINKING, REASONING_PARSER, SCANNING_PARSER
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from vllm_dartree import grammars
from vllm_dartree.engine.state import TreeState

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


@contextmanager
def foreseeing(trees, futures: list[list[int]]) -> Iterator[None]:
    """Drafts what the target will say, beside other tokens, so that paths reach as far as they can, over every end."""
    states, native = runner(trees).req_states, TreeState.write

    def write(self, slots, tree):
        tokens, parents = tree.tokens.clone(), tree.parents.clone()
        names = {slot: name for name, slot in states.req_id_to_index.items()}
        for place, slot in enumerate(slots.tolist()):
            if slot not in names:
                continue
            text = states.all_token_ids.gpu[slot, states.prompt_len.np[slot] : states.total_len.gpu[slot]].tolist()
            future = futures[int(names[slot].split("-")[0])]
            # The last round of a request may go beyond its end.
            assert future[: len(text)] == text[: len(future)]
            nodes, parent = [], 0
            for token in future[len(text) : len(text) + self.max_depth]:
                for sibling in ((token + 1) % 1000, token):  # the right one is never the first
                    nodes.append((sibling, parent))
                parent = len(nodes)
            nodes = [*nodes[: self.budget], *[(0, -1)] * (self.budget - len(nodes))]
            tokens[place] = torch.tensor([token for token, _ in nodes])
            parents[place] = torch.tensor([0, *(parent for _, parent in nodes)])
        return native(self, slots, replace(tree, tokens=tokens, parents=parents))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TreeState, "write", write)
        yield


CHOICE = {"choice": ["return self", "return None", "cold cable"]}
BEYOND = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
END = 0  # the token <|endoftext|>
COLD_CABLE = [68, 527, 284, 449]


@pytest.mark.parametrize("backend", ["xgrammar", "guidance", "outlines"])
def test_paths_beyond_the_end_of_a_grammar(prompts, backend):
    """And beside what other processing forbids, where the target may be left without any token."""

    def params() -> list[SamplingParams]:
        asks = (
            (CHOICE, {}),
            ({"regex": r" --[a-z]{3,8}-[a-z]{3,8}"}, {}),
            (CHOICE, {"temperature": 1.0, "seed": 2, "repetition_penalty": 1.2}),
            (CHOICE, {"stop_token_ids": [272, 200], "min_tokens": 3}),
            # Where the grammar may end or go on.
            ({"regex": r"[a-z]{2,4}( [a-z]{2,4})*"}, {"logit_bias": {END: 6.0}}),
            ({"regex": r"[\s\S]*"}, {"logit_bias": {END: 9.0}}),
            # The last token of the only choice is not among the allowed ones.
            ({"choice": ["cold cable"]}, {"allowed_token_ids": [*COLD_CABLE[:3], 5, 200, 272]}),
        )
        # Anew for each engine, which notes its backend in them.
        bound = [SamplingParams(**BEYOND | keys, structured_outputs=StructuredOutputsParams(**by)) for by, keys in asks]
        return [*bound, SamplingParams(**BEYOND)]

    settings = {"structured_outputs_config": {"backend": backend}}
    asked = prompts[1 : 2 * len(params()) : 2]
    expected = run(engine(**settings), asked, params())
    assert sum(END in one.tokens[1:-1] for one in expected) > 3
    trees = engine(dartree(), **settings)
    with foreseeing(trees, tokens(expected)), counted(trees) as drafts:
        actual = run(trees, asked, params(), arrive_every=1)
    assert [(one.tokens, one.finish_reason) for one in actual] == [(one.tokens, one.finish_reason) for one in expected]
    assert drafts.tau > 4


@pytest.mark.parametrize("parser", [REASONING_PARSER, SCANNING_PARSER])
def test_a_grammar_that_begins_on_a_path(prompts, parser):
    """Behind the end of reasoning; where only the parser can tell it, drafts are of use from then on."""

    def params() -> list[SamplingParams]:
        grammar = StructuredOutputsParams(regex=r"\n    pass\n\n\ndef [a-z]{3,9}")
        return [SamplingParams(**GREEDY, structured_outputs=grammar)] * 2

    settings = {"reasoning_parser": parser, "structured_outputs_config": {"backend": "xgrammar"}}
    asked = [prompts[2], prompts[6]]  # they end with "def", which begins the reasoning
    expected = tokens(run(engine(**settings), asked, params()))
    assert all(END_OF_THINKING in answer[1:] for answer in expected)
    trees = engine(dartree(), **settings)
    assert tokens(run(trees, asked, params())) == expected
    with foreseeing(trees, expected), counted(trees) as drafts:
        assert tokens(run(trees, asked, params(), arrive_every=1)) == expected
    assert drafts.tau > (4 if parser == REASONING_PARSER else 1.2)


def test_nodes_come_out_as_they_went_in():
    tokens, parents = torch.tensor([0, 151935, 7, 0]), torch.tensor([0, 64, 1, -1])
    pairs = [grammars.unpacked(node) for node in grammars.packed(tokens, parents).tolist()]
    assert pairs == list(zip(tokens.tolist(), parents.tolist(), strict=True))
