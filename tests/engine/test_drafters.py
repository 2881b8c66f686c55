"""Every kind of drafter: its drafts are those of vLLM's own chain, and its trees change no token."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from engine import drafters
from engine.engines import counted, dartree, engine, run, runner, tokens
from vllm import SamplingParams
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model
from vllm.model_executor.models.qwen3_dspark import DSparkMarkovHead

from vllm_dartree.assets import DFLASH2, DSPARK, TARGET
from vllm_dartree.engine.draft_models.dspark import projection_rows
from vllm_dartree.engine.vllm_models import normalize_each_layer
from vllm_dartree.heads import DrafterConfigError, MarkovHead
from vllm_dartree.reference.checkpoint import load_drafter, load_target
from vllm_dartree.reference.decoder import ReferenceDecoder
from vllm_dartree.tree import draft_block

GREEDY = SamplingParams(temperature=0, max_tokens=20)


@pytest.fixture
def checkpoint(tmp_path_factory, prompts):
    """A drafter of a kind, and the method of vLLM's that drafts its chain."""

    def make(kind: str) -> tuple[str, str]:
        folder = tmp_path_factory.mktemp("drafter") / "checkpoint"
        match kind:
            case "dspark":
                return str(DSPARK), "dspark"
            case "dspark whose anchor predicts":
                return drafters.dspark(folder, sample_from_anchor=True), "dspark"
            case "dspark of few candidates":
                return drafters.dspark(folder, dspark_draft_topk=6), "dspark"
            case "dspark of few tokens":
                used = Counter(token for prompt in prompts for token in prompt)
                kept = sorted(token for token, _ in used.most_common(300))
                return drafters.dspark_of_few_tokens(folder, kept, logit_scale=0.5), "dspark"
            case "dflash2":
                return drafters.dflash2_with_mixing_rows(folder), "dflash"
            case "lilicorr":
                return drafters.lilicorr(folder), "dflash"

    return make


def _drafts(llm, monkeypatch) -> list[list[int]]:
    """What the engine proposes from now on, each time for its first request."""
    speculator, seen = runner(llm).speculator, []
    propose = speculator.propose

    def record(*args, **kwargs):
        drafted = propose(*args, **kwargs)
        seen.append(drafted[0].tolist())
        return drafted

    monkeypatch.setattr(speculator, "propose", record)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "num_slots", "keys"),
    [
        # Unless it is told otherwise, vLLM's DSpark corrects the whole vocabulary.
        ("dspark", 15, {"tree_candidates": 1024}),
        ("dspark whose anchor predicts", 16, {"tree_candidates": 1024}),
        ("dspark of few candidates", 15, {}),
        ("dspark of few tokens", 15, {"tree_candidates": 300}),
        ("dflash2", 15, {}),
        ("lilicorr", 15, {}),
    ],
)
def test_drafts_are_those_of_vllms_own_chain(prompts, checkpoint, kind, num_slots, keys, monkeypatch):
    # vLLM's own has a fault on CPUs that mend_context_keys mends; alike in all else, they draft alike.
    monkeypatch.setattr(DFlashQwen3Model, "_normalize_context_k", normalize_each_layer)
    model, method = checkpoint(kind)
    native = engine({"method": method, "model": model, "num_speculative_tokens": num_slots})
    assert type(runner(native).speculator).__module__.startswith("vllm.v1.")
    chain = engine(dartree(num_slots, model, tree_variant="chain", **keys))
    expected = tokens(run(engine(), prompts[:1], GREEDY))
    seen = []
    for llm in (native, chain):
        seen.append(_drafts(llm, monkeypatch))
        assert tokens(run(llm, prompts[:1], GREEDY)) == expected
    assert [drafted[:num_slots] for drafted in seen[1]] == seen[0]
    assert len(seen[0]) > 1
    if kind == "dflash2":  # the reference's convolution against vLLM's
        target = load_target(str(TARGET), dtype=torch.float32, device="cpu")
        generation = ReferenceDecoder(target, load_drafter(model, target), "dflash2").generate(prompts[0], 20)
        rounds = [done.tree.tokens[0].tolist() for done in generation.rounds]
        assert rounds == seen[0][: len(rounds)]
    # More rows than the block has slots: nothing in the drafter may take the budget for its block.
    trees = engine(dartree(20, model))
    with counted(trees):
        assert tokens(run(trees, prompts[:3], GREEDY)) == tokens(run(engine(), prompts[:3], GREEDY))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dspark", "dflash2", "lilicorr"])
def test_seeded_batches_and_prefix_cache(prompts, checkpoint, name):
    model = str(DFLASH2) if name == "dflash2" else checkpoint(name)[0]
    trees = engine(dartree(model=model), enable_prefix_caching=True)
    long = [token for prompt in prompts[:24] for token in prompt][:300]  # several blocks of the CPU's 128 tokens
    batch = [long, *prompts[:3]]
    params = [
        SamplingParams(temperature=0, max_tokens=16),
        SamplingParams(temperature=1.0, seed=2, max_tokens=16),
        SamplingParams(temperature=0.7, top_k=20, top_p=0.9, seed=5, max_tokens=16),
        SamplingParams(temperature=0, max_tokens=16),
    ]
    expected = tokens(run(engine(), batch, params))
    with counted(trees) as drafts:
        assert tokens(run(trees, batch, params)) == expected
        assert tokens(run(trees, batch, params, arrive_every=2)) == expected
    assert drafts.prefix_hits > 0


def test_a_quantised_projection_scores_as_vllms_gathered_path():
    ranks, vocabulary, group = 32, 20, 16
    torch.manual_seed(0)
    projection = SimpleNamespace(
        _retain_weight_for_gather=True,
        is_w4a16_nvfp4=True,
        _nvfp4_weight_for_gather=torch.randint(256, (vocabulary, ranks // 2), dtype=torch.uint8),
        _nvfp4_weight_scale_for_gather=(1 + torch.rand(vocabulary, ranks // group)).to(torch.float8_e4m3fn),
        _nvfp4_weight_global_scale_for_gather=torch.tensor(0.25),
        _nvfp4_group_size_for_gather=group,
    )
    embedding = torch.randn(vocabulary, ranks)
    head = MarkovHead(embedding.__getitem__, projection_rows(projection, torch.float32), scale=0.5)
    anchor, base = torch.tensor([3, 7]), torch.randn(2, 1, vocabulary)
    block = draft_block(anchor, torch.zeros(2, 1, 1), base, 6)
    prepared = head.prepare(block)
    corrected = block.base[:, 0] + head.score(prepared, 0, head.root_state(prepared))[:, 0]
    logits = torch.full((2, vocabulary), float("-inf"))
    index = block.candidates[:, 0]
    DSparkMarkovHead.apply_bias_gathered(
        SimpleNamespace(markov_w2=projection), embedding[anchor], logits, block.base[:, 0], index, 0.5
    )
    torch.testing.assert_close(corrected, logits.gather(1, index))


def test_a_projection_quantised_in_another_way_is_refused():
    packed = SimpleNamespace(
        _retain_weight_for_gather=True,
        is_w4a16_nvfp4=False,
        weight=torch.zeros(4, 2, dtype=torch.float8_e4m3fn),
        quant_method="Fp8LinearMethod",
    )
    with pytest.raises(DrafterConfigError, match=r"'markov_head\.markov_w2' is quantised"):
        projection_rows(packed, torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "method"), [(DSPARK, "dspark"), (DFLASH2, "dflash")], ids=["dspark", "dflash2"])
def test_a_tree_accepts_no_less_than_vllms_own_chain(prompts, model, method, monkeypatch):
    monkeypatch.setattr(DFlashQwen3Model, "_normalize_context_k", normalize_each_layer)
    params = SamplingParams(temperature=0, max_tokens=48)
    native = engine({"method": method, "model": str(model), "num_speculative_tokens": 15})
    trees = engine(dartree(64, str(model)))
    with counted(native) as chain:
        run(native, prompts[:8], params)
    with counted(trees) as tree:
        run(trees, prompts[:8], params)
    assert tree.tau > chain.tau > 2
