"""Every system is lossless, and the reference decoder's tree, cache and features are what they claim to be."""

import pytest
import torch

from vllm_dartree.reference import decoder as decoder_module
from vllm_dartree.reference.decoder import ReferenceDecoder, Summary, choose
from vllm_dartree.reference.kv_cache import TreeCache, TreeCacheLayer
from vllm_dartree.reference.systems import SYSTEMS, HitRates, System
from vllm_dartree.tree import DraftTree, TreeConfig, topology
from vllm_dartree.tree.oracles import draft_tree

SPECULATIVE = [name for name in SYSTEMS if name != "ar"]


def _decoder(target, drafters, system, config=None, **settings):
    if system == "ar":
        return ReferenceDecoder(target, None, system, config, **settings)
    return ReferenceDecoder(target, drafters[SYSTEMS[system].needs or "domino"], system, config, **settings)


def _decode(target, drafters, prompts, system, max_new_tokens=96, config=None, **settings):
    decoder = _decoder(target, drafters, system, config, **settings)
    return [decoder.generate(prompt, max_new_tokens) for prompt in prompts]


@pytest.fixture(scope="module")
def plain(target, drafters, prompts):
    """Tokens without speculation, by temperature."""
    return {
        temperature: [g.tokens for g in _decode(target, drafters, prompts[:12], "ar", temperature=temperature, seed=5)]
        for temperature in (0.0, 1.0)
    }


def test_ar_equals_transformers_generate(target, prompts, plain):
    for prompt, tokens in zip(prompts[:12], plain[0.0], strict=True):
        generated = target.model.generate(torch.tensor([prompt]), max_new_tokens=96, do_sample=False)
        assert generated[0, len(prompt) :].tolist() == tokens


@pytest.mark.parametrize("system", SPECULATIVE)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_equal_those_without_speculation(target, drafters, prompts, plain, system, temperature):
    generations = _decode(target, drafters, prompts[:12], system, temperature=temperature, seed=5)
    assert [generation.tokens for generation in generations] == plain[temperature]
    assert Summary.of(generations).tau > 1.5, "a drafter that is never right would make this test say nothing"


@pytest.mark.parametrize("knobs", [{"budget": 1}, {"budget": 8, "width": 3}, {"budget": 128}, {"depth": 5}])
def test_knobs_do_not_change_tokens(target, drafters, prompts, plain, knobs):
    generations = _decode(target, drafters, prompts[:4], "dartree", config=TreeConfig(**knobs))
    assert [generation.tokens for generation in generations] == plain[0.0][:4]


@pytest.mark.parametrize("chain", ["dspark", "dflash2"])
def test_a_tree_accepts_no_less_than_the_chain_of_the_same_drafter(target, drafters, prompts, chain):
    taus = [Summary.of(_decode(target, drafters, prompts[:4], name)).tau for name in (chain, f"dartree_{chain}")]
    assert taus[1] > taus[0]


def test_a_drafters_own_candidates_bound_those_of_the_tree(target, drafters):
    config = _decoder(target, drafters, "dartree_dflash2", TreeConfig(width=20)).config
    assert (config.candidates, config.width) == (16, 16)


def test_trees_beat_chains_and_marginal_trees(target, drafters, prompts):
    tau = {
        system: Summary.of(_decode(target, drafters, prompts[:16], system, 160)).tau
        for system in ("dflash", "domino", "ddtree", "dartree")
    }
    assert tau["dflash"] < tau["domino"] < tau["dartree"]
    assert tau["ddtree"] < tau["dartree"]


def test_target_does_not_loop_on_the_bundled_prompts(target, drafters, prompts):
    for prompt, generation in zip(prompts[:24], _decode(target, drafters, prompts[:24], "dartree", 700), strict=True):
        assert generation.tokens[-1] in target.end_token_ids, target.tokenizer.decode(prompt)


def test_a_generation_stops_at_max_new_tokens_and_behind_the_end_token(target, drafters, prompts):
    full = _decode(target, drafters, prompts[:1], "dartree", 400)[0]
    assert full.tokens[-1] in target.end_token_ids
    assert not set(full.tokens[:-1]) & target.end_token_ids
    for limit in (1, 2, 7, 30):
        assert _decode(target, drafters, prompts[:1], "dartree", limit)[0].tokens == full.tokens[:limit]


def test_each_row_of_the_verify_forward_sees_its_own_path_alone(target, drafters, prompts):
    decoder = _decoder(target, drafters, "ar")
    prompt, anchor = prompts[0], 17
    tree = draft_tree([(5, 0, -0.1), (9, 0, -0.2), (7, 1, -0.3), (5, 2, -0.4), (11, 3, -0.5), (3, 4, -0.6)])
    shape, size = topology(tree.parents), len(prompt)
    cache = TreeCache(len(target.layers), size + 16)
    with torch.inference_mode():
        decoder._prefill(prompt, cache, None)
        tokens = torch.cat([torch.tensor([anchor]), tree.tokens[0]])
        logits = decoder._forward(tokens, size + shape.depths[0], shape.ancestors[0], cache)
        for row in range(len(tokens)):
            path = tokens[shape.ancestors[0, row]].tolist()
            alone = target.model(torch.tensor([prompt + path])).logits[0, -1]
            torch.testing.assert_close(logits[row], alone, atol=1e-4, rtol=1e-4)


def test_commit_reads_all_rows_before_it_writes_one():
    layer = TreeCacheLayer(capacity=12)
    rows = torch.arange(10.0).view(1, 1, 10, 1)
    layer.update(rows[:, :, :3], -rows[:, :, :3])
    layer.commit(torch.arange(3))
    layer.update(rows[:, :, 3:], -rows[:, :, 3:])
    layer.commit(torch.tensor([0, 2, 3, 6]))
    keys, values = layer.filled_rows()
    assert keys.flatten().tolist() == [0, 1, 2, 3, 5, 6, 9]
    assert torch.equal(values, -keys)
    assert layer.committed == layer.get_seq_length() == 7


def test_committed_rows_equal_a_fresh_prefill(target, drafters, prompts):
    """A missing or misplaced row of features would leave tokens right and only ruin the drafts."""
    decoder = _decoder(target, drafters, "dartree")
    prompt, generation = prompts[1], decoder_module.Generation()
    caches = TreeCache(len(target.layers), 512), TreeCache(len(decoder.drafter.model.layers), 512)
    fresh = TreeCache(len(target.layers), 512), TreeCache(len(decoder.drafter.model.layers), 512)
    with torch.inference_mode(), decoder._capture_features():
        anchor = decoder._prefill(prompt, *caches)
        tokens = [*prompt, anchor]
        while len(generation.rounds) < 6:
            done = decoder._round(generation, anchor, *caches)
            anchor = done.emitted[-1]
            tokens += done.emitted
        assert any(done.path != list(range(len(done.path))) for done in generation.rounds), "no row ever moved"
        decoder._prefill(tokens[:-1], *fresh)
        for kept, expected in zip(caches, fresh, strict=True):
            assert kept.committed == expected.committed == len(tokens) - 1
            for layer, other in zip(kept.layers, expected.layers, strict=True):
                for moved, prefilled in zip(layer.filled_rows(), other.filled_rows(), strict=True):
                    torch.testing.assert_close(moved, prefilled, atol=1e-3, rtol=1e-3)
        kept, expected = decoder._draft(anchor, caches[1]), decoder._draft(anchor, fresh[1])
        torch.testing.assert_close(kept.logits, expected.logits, atol=1e-2, rtol=1e-2)


def test_noise_depends_on_seed_and_position_alone():
    logits = torch.zeros(6, 1000)
    picks = choose(logits, [3, 4, 3, 9, 4, 3], temperature=1.0, seed=1).tolist()
    assert picks[0] == picks[2] == picks[5]
    assert picks[1] == picks[4]
    assert len(set(picks)) == 3
    seeds = [0, 1, 1 << 8, 1 << 16, 1 << 32, 1 << 40]
    assert len({int(choose(logits[:1], [3], temperature=1.0, seed=seed)) for seed in seeds}) == len(seeds)


def test_a_round_without_any_live_node_still_emits_the_targets_token(target, drafters, prompts, plain, monkeypatch):
    dead = DraftTree(torch.zeros(1, 4).long(), torch.tensor([[0, -1, -1, -1, -1]]), torch.full((1, 4), float("-inf")))

    def propose_nothing(draft, block, head, config):
        proposal = SYSTEMS["dartree"].propose(draft, block, head, config)
        proposal.tree = dead
        return proposal

    decoder = _decoder(target, drafters, "dartree")
    decoder.system = System(propose_nothing)
    generation = decoder.generate(prompts[0], 24)
    assert generation.tokens == plain[0.0][0][:24]
    assert Summary.of([generation]).tau == 1.0


def test_a_system_refuses_a_drafter_without_its_head(target, drafters):
    with pytest.raises(ValueError, match="'domino' needs a drafter with a domino head, but this one has a markov head"):
        ReferenceDecoder(target, drafters["markov"], "domino")
    with pytest.raises(ValueError, match="'dartree' needs a drafter"):
        ReferenceDecoder(target, None, "dartree")


def test_prompts_that_cannot_fit_are_refused(target, drafters):
    decoder = _decoder(target, drafters, "dartree")
    with pytest.raises(ValueError, match="a prompt of 0 tokens and 8 new tokens do not fit"):
        decoder.generate([], 8)
    with pytest.raises(ValueError, match="at most 2048"):
        decoder.generate([5] * 2047, 8)


def test_hit_rates_count_first_choices_and_siblings():
    rates = HitRates()
    rates.add(guesses=[1, 2, 3], emitted=[1, 2, 9])  # right, right, wrong: all on the spine
    rates.add(guesses=[1, 2, 3], emitted=[5, 2, 3])  # a sibling first, then right behind it; slot 2 is neither
    rates.add(guesses=[4], emitted=[4, 8])  # the block ends before the last token
    assert (rates.spine_trials, rates.spine_hits) == (5, 3)
    assert (rates.sibling_trials, rates.sibling_hits) == (1, 1)
    assert HitRates().on_spine is None
    assert HitRates().after_sibling is None
