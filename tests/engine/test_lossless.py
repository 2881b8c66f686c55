"""With trees on, an engine says what it says without speculation, token for token."""

import json
from pathlib import Path

import pytest
import torch
from engine.engines import counted, dartree, engine, run, runner, tokens
from safetensors.torch import load_file, save_file
from vllm import SamplingParams
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

from vllm_dartree.assets import DOMINO, TARGET
from vllm_dartree.engine.vllm_models import normalize_each_layer
from vllm_dartree.reference.checkpoint import load_drafter, load_target
from vllm_dartree.reference.decoder import ReferenceDecoder
from vllm_dartree.tree import TreeConfig

GREEDY = SamplingParams(temperature=0, max_tokens=32)
SAMPLING = [
    SamplingParams(temperature=0.3, seed=1, max_tokens=32),
    SamplingParams(temperature=1.0, seed=2, max_tokens=32),
    SamplingParams(temperature=1.0, top_p=0.8, seed=3, max_tokens=32),
    SamplingParams(temperature=1.0, top_k=5, seed=4, max_tokens=32),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.9, seed=5, max_tokens=32),
    GREEDY,
]


@pytest.mark.slow
def test_greedy_in_batches_with_chunked_prefill_and_arrivals(prompts):
    # A budget of tokens below one batch of trees, and below the longest prompts, cuts both prefills and trees.
    settings = {"max_num_batched_tokens": 96, "max_num_seqs": 8}
    plain = run(engine(**settings), prompts[:64], GREEDY)
    trees = engine(dartree(), **settings)
    with counted(trees) as drafts:
        assert tokens(run(trees, prompts[:64], GREEDY, arrive_every=1)) == tokens(plain)
    assert drafts.tau > 2


def test_sampling_with_seeds_alone_and_in_any_batch(prompts):
    plain, trees = engine(), engine(dartree())
    expected = tokens(run(plain, prompts[: len(SAMPLING)], SAMPLING))
    assert tokens(run(trees, prompts[: len(SAMPLING)], SAMPLING)) == expected
    assert tokens(run(trees, prompts[: len(SAMPLING)], SAMPLING, arrive_every=2)) == expected
    for i in (1, 4):
        assert tokens(run(trees, prompts[i : i + 1], SAMPLING[i])) == [expected[i]]


@pytest.mark.parametrize(
    "keys",
    [
        {"budget": 1},
        {"budget": 8, "tree_variant": "fixed"},
        {"budget": 15, "tree_variant": "chain"},
        {"budget": 64, "tree_width": 12},
        {"budget": 128},
        {"budget": 8, "tree_depth": 3, "tree_width": 4, "tree_candidates": 8, "tree_depth_bonus": 0.0},
    ],
    ids=lambda keys: "-".join(f"{key}={value}" for key, value in keys.items()),
)
def test_budgets_and_variants(prompts, keys):
    expected = tokens(run(engine(), prompts[:3], GREEDY))
    trees = engine(dartree(**keys))
    with counted(trees) as drafts:
        assert tokens(run(trees, prompts[:3], GREEDY)) == expected
    assert drafts.accepted > 0


@pytest.mark.parametrize("changes", [{"block_size": 8}, {"projector_type": None}, {"pure_draft_prefix_len": 0}])
def test_other_drafters(prompts, drafter_with, changes):
    expected = tokens(run(engine(), prompts[:3], GREEDY))
    trees = engine(dartree(model=drafter_with(**changes)))
    with counted(trees) as drafts:
        assert tokens(run(trees, prompts[:3], GREEDY)) == expected
    assert drafts.accepted > 0


def test_a_gru_with_biases(prompts, drafter_with):
    folder = Path(drafter_with())
    shard = folder / "model-00002-of-00002.safetensors"
    biases = {f"prefix_gru.bias_{kind}_l0": torch.full((384,), 0.05, dtype=torch.bfloat16) for kind in ("ih", "hh")}
    save_file(load_file(shard) | biases, shard, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"] |= dict.fromkeys(biases, shard.name)
    index.write_text(json.dumps(content))
    expected = tokens(run(engine(), prompts[:2], GREEDY))
    trees = engine(dartree(model=str(folder)))
    assert runner(trees).speculator.draft_model.head.input_bias is not None
    with counted(trees) as drafts:
        assert tokens(run(trees, prompts[:2], GREEDY)) == expected
    assert drafts.accepted > 0


def test_a_block_whose_anchor_predicts_the_first_slot(prompts, drafter_with):
    # The bundled weights were not trained for this layout: acceptance means nothing here, tokens do.
    expected = tokens(run(engine(), prompts[:3], GREEDY))
    trees = engine(dartree(model=drafter_with(shift_label=True)))
    assert runner(trees).speculator.num_query_per_req == 16
    assert tokens(run(trees, prompts[:3], GREEDY)) == expected


def test_prefix_cache_hits(prompts):
    long = [[token for prompt in prompts[:24] for token in prompt][:400]]  # several blocks of the CPU's 128 tokens
    settings = {"enable_prefix_caching": True}
    expected = tokens(run(engine(**settings), long, GREEDY))
    trees = engine(dartree(), **settings)
    with counted(trees) as drafts:
        for _ in range(3):
            assert tokens(run(trees, long, GREEDY)) == expected
    assert drafts.prefix_hits > 0


def test_ends_of_generations(prompts):
    plain, trees = engine(max_model_len=128), engine(dartree(), max_model_len=128)
    for params in (
        SamplingParams(temperature=0, max_tokens=400),  # ends at max_model_len, or at the end token in a path
        SamplingParams(temperature=0, max_tokens=7),
        SamplingParams(temperature=0, max_tokens=1),
        SamplingParams(temperature=0, max_tokens=60, stop_token_ids=[run(plain, prompts[:1], GREEDY)[0].tokens[9]]),
    ):
        expected, actual = run(plain, prompts[:4], params), run(trees, prompts[:4], params)
        assert [(f.tokens, f.finish_reason) for f in actual] == [(f.tokens, f.finish_reason) for f in expected]


@pytest.mark.slow
def test_preemption(prompts):
    # Six blocks of 128 tokens, for requests that grow into their second one.
    settings = {"kv_cache_memory_bytes": 3 << 20, "max_num_seqs": 8, "max_model_len": 256}
    params = SamplingParams(temperature=0, max_tokens=128)
    expected = tokens(run(engine(), prompts[:8], params))
    trees = engine(dartree(), **settings)
    with counted(trees) as drafts:
        assert tokens(run(trees, prompts[:8], params)) == expected
    assert drafts.preemptions > 0


def test_logprobs_belong_to_the_emitted_tokens(prompts):
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=3)
    expected, actual = run(engine(), prompts[:2], params), run(engine(dartree()), prompts[:2], params)
    assert tokens(actual) == tokens(expected)
    for one, other in zip(actual, expected, strict=True):
        assert len(one.logprobs) == len(one.tokens)
        for step, wanted in zip(one.logprobs, other.logprobs, strict=True):
            assert step.keys() == wanted.keys()
            for token, logprob in wanted.items():
                assert step[token] == pytest.approx(logprob, abs=1e-3)


def _rounds(llm, prompt, max_tokens):
    """Parents, tokens and accepted rows of every verify round of one request."""
    state, seen = runner(llm).speculator.trees, []
    sampler = runner(llm).rejection_sampler
    native = type(sampler).__call__

    def record(self, logits, input_batch, *args):
        output = native(self, logits, input_batch, *args)
        step = state.step
        count = int(step.num_nodes[0])
        path = step.accepted.path[0]
        drafted = input_batch.input_ids[step.tokens][1:].tolist()
        seen.append((step.parents[0, : count + 1].tolist(), drafted, path[path >= 0].tolist()))
        return output

    type(sampler).__call__ = record
    try:
        finished = run(llm, [prompt], SamplingParams(temperature=0, max_tokens=max_tokens))
    finally:
        type(sampler).__call__ = native
    return finished[0].tokens, seen


def test_trees_and_rounds_equal_the_reference_decoders(prompts):
    target = load_target(str(TARGET), dtype=torch.float32, device="cpu")
    decoder = ReferenceDecoder(target, load_drafter(str(DOMINO), target), "dartree", TreeConfig(budget=16))
    for prompt in prompts[:3]:
        emitted, seen = _rounds(engine(dartree()), prompt, 40)
        generation = decoder.generate(prompt, 40)
        assert emitted == generation.tokens
        # vLLM's scheduler cuts the trees of a request that is about to reach max_tokens; compare all rounds before.
        assert len(seen) == len(generation.rounds)
        for (parents, drafted, path), wanted in zip(seen[:-1], generation.rounds[:-1], strict=True):
            assert parents == wanted.tree.parents[0].tolist()
            assert drafted == wanted.tree.tokens[0].tolist()
            assert path == wanted.path


@pytest.mark.slow
def test_tau_is_the_same_at_any_concurrency(prompts):
    trees, seen = engine(dartree()), []
    for concurrency in (1, 4, 16):
        with counted(trees) as drafts:
            for start in range(0, 16, concurrency):
                run(trees, prompts[start : start + concurrency], GREEDY)
        seen.append((drafts.rounds, drafts.accepted))
    assert seen[0] == seen[1] == seen[2]


def test_a_marginal_chain_drafts_exactly_as_vllms_own_dflash(prompts, drafter_with, monkeypatch):
    """A wrong row of features, position or cache slot would leave tokens right and change what is accepted."""
    # vLLM's own has the fault that mend_context_keys mends; alike in all else, they draft alike.
    monkeypatch.setattr(DFlashQwen3Model, "_normalize_context_k", normalize_each_layer)
    plain_drafter = drafter_with(projector_type=None)
    native = engine({"method": "dflash", "model": plain_drafter, "num_speculative_tokens": 15})
    assert type(runner(native)).__module__.startswith("vllm."), "dflash stays vLLM's own with the plugin installed"
    chain = engine(dartree(15, plain_drafter, tree_variant="chain"))
    expected = tokens(run(engine(), prompts[:4], GREEDY))
    seen = []
    for llm in (native, chain):
        with counted(llm) as drafts:
            assert tokens(run(llm, prompts[:4], GREEDY)) == expected
        seen.append((drafts.rounds, drafts.accepted))
    assert seen[0] == seen[1]
    assert seen[0][1] > 0
