"""Features of the engine, and targets of many kinds: with trees every one says what it says without."""

from contextlib import contextmanager

import pytest
from engine import targets
from engine.engines import counted, dartree, engine, run, runner, tokens
from PIL import Image
from vllm import SamplingParams
from vllm.distributed import parallel_state
from vllm.lora.request import LoRARequest
from vllm.model_executor.models.qwen3 import Qwen3DecoderLayer, Qwen3Model
from vllm.platforms.cpu import CpuPlatform

from vllm_dartree.assets import TARGET

GREEDY = SamplingParams(temperature=0, max_tokens=24)
SAMPLED = SamplingParams(temperature=1.0, seed=5, max_tokens=24)
FOUR = [GREEDY, SAMPLED, GREEDY, SamplingParams(temperature=0.7, top_p=0.9, seed=6, max_tokens=24)]

pytestmark = pytest.mark.slow


# --- The scheduler ---------------------------------------------------------------------------------------------------


@contextmanager
def cache_hits(llm):
    """Appends ``(queried, hit)`` tokens of the block, from what the engine hands to its loggers."""
    manager, seen = llm.llm_engine.logger_manager, []
    record, totals = manager.record, [0, 0]

    def count(scheduler_stats, *args, **kwargs) -> None:
        if scheduler_stats:
            totals[0] += scheduler_stats.prefix_cache_stats.queries
            totals[1] += scheduler_stats.prefix_cache_stats.hits
        record(scheduler_stats, *args, **kwargs)

    manager.record = count
    try:
        yield seen
    finally:
        manager.record = record
    seen.append(tuple(totals))


def test_prefix_cache_counts_as_without_speculation(prompts):
    text = [token for prompt in prompts for token in prompt]
    # Two share two blocks of 128 tokens, and one ends with its second block.
    three = [text[:300], text[:290], text[400:656]]
    settings = {"enable_prefix_caching": True}
    plain, trees = engine(**settings), engine(dartree(), **settings)
    seen = []
    for llm in (plain, trees):
        llm.reset_prefix_cache()
        for _ in range(2):
            with cache_hits(llm) as counts:
                seen.append(tokens([run(llm, [prompt], GREEDY)[0] for prompt in three]))
            seen += counts
    print(seen[1], seen[3], seen[5], seen[7])
    assert seen[:4] == seen[4:]
    assert seen[3][1] > 0


def test_dynamic_budget_by_batch_size(prompts):
    schedule = [[1, 1, 16], [2, 2, 5], [3, 3, 1], [4, 8, 0]]
    trees = engine(dartree(num_speculative_tokens_per_batch_size=schedule))
    expected = tokens(run(engine(), prompts[:4], FOUR))
    for every in (0, 3):
        assert tokens(run(trees, prompts[:4], FOUR, arrive_every=every)) == expected
    for count, bound in ((1, 16), (2, 5), (3, 1)):
        with counted(trees) as drafts:
            run(trees, prompts[:count], GREEDY)
        print(count, drafts)


def test_more_requests_than_places(prompts):
    settings = {"max_num_seqs": 2}
    expected = tokens(run(engine(), prompts[:7], FOUR + FOUR[:3]))
    assert tokens(run(engine(dartree(), **settings), prompts[:7], FOUR + FOUR[:3])) == expected


def test_priorities_with_preemption(prompts):
    pass


def test_asynchronous_scheduling(prompts, monkeypatch):
    # vLLM turns it off on CPUs; a GPU has it on.
    native = CpuPlatform.check_and_update_config

    def keep(vllm_config) -> None:
        native(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", staticmethod(keep))
    trees = engine(dartree(), async_scheduling=True)
    assert trees.llm_engine.vllm_config.scheduler_config.async_scheduling
    expected = tokens(run(engine(), prompts[:4], FOUR))
    for every in (0, 2):
        with counted(trees) as drafts:
            assert tokens(run(trees, prompts[:4], FOUR, arrive_every=every)) == expected
        print(drafts)


def test_reloaded_weights(prompts, tmp_path):
    plain, trees = engine(), engine(dartree())
    other = targets.untied(tmp_path / "x")
    expected = tokens(run(plain, prompts[:2], GREEDY))


# --- Targets ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("targets")


def assert_same(target: str, prompts, tau: float = 2.0, **settings):
    """With trees, a target says what it says without; returns both."""
    expected = tokens(run(engine(model=target, **settings), prompts[:4], FOUR))
    trees = engine(dartree(), model=target, **settings)
    with counted(trees) as drafts:
        assert tokens(run(trees, prompts[:4], FOUR)) == expected
    print(drafts, drafts.tau)
    assert drafts.tau > tau
    return expected, trees


def test_an_untied_head(prompts, folder):
    expected, trees = assert_same(targets.untied(folder / "untied"), prompts)
    assert expected != tokens(run(engine(), prompts[:4], FOUR))
    model = runner(trees).model
    assert runner(trees).speculator.model.lm_head is model.lm_head is not model.model.embed_tokens


def test_a_mixture_of_experts(prompts, folder, monkeypatch):
    engine()
    if parallel_state._EP is None:
        # vLLM makes the group with the first engine of a process, if that has experts.
        monkeypatch.setattr(parallel_state, "_EP", parallel_state.get_tp_group())
    assert_same(targets.moe(folder / "moe"), prompts)


@pytest.mark.parametrize(("head_size", "num_heads", "num_kv_heads"), [(64, 12, 2), (96, 6, 6)])
def test_heads_of_other_sizes_and_numbers(prompts, folder, head_size, num_heads, num_kv_heads):
    target = targets.with_heads(folder / str(head_size), head_size, num_heads, num_kv_heads)
    expected, _ = assert_same(target, prompts)
    assert expected == tokens(run(engine(), prompts[:4], FOUR))


class CappedLayer(Qwen3DecoderLayer):
    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.self_attn.attn.impl.logits_soft_cap = 8.0


def test_a_soft_cap_of_the_attention_logits(prompts, monkeypatch):
    monkeypatch.setattr(Qwen3Model, "decoder_layer_type", CappedLayer)
    expected, _ = assert_same(str(TARGET), prompts, tau=1.5, max_num_seqs=9)
    assert expected != tokens(run(engine(), prompts[:4], FOUR))


def test_a_multimodal_target(prompts, folder):
    target = targets.multimodal(folder / "llava")
    expected, trees = assert_same(target, prompts)
    assert expected == tokens(run(engine(), prompts[:4], FOUR))
    image = Image.new("RGB", (16, 16), "red")
    ask = [{"prompt_token_ids": [*prompts[0], 1, *prompts[1]], "multi_modal_data": {"image": image}}]
    a, b = [llm.generate(ask, GREEDY, use_tqdm=False)[0].outputs[0].token_ids for llm in (engine(model=target), trees)]
    print(a, b)
    assert a == b


def test_adapters_beside_the_base(prompts, folder):
    adapters = [LoRARequest(f"a{i}", i, targets.adapter(folder / f"lora{i}", i)) for i in (1, 2)]
    who = [None, adapters[0], adapters[1], adapters[0], None]
    settings = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    results = []
    for speculative in (None, dartree()):
        llm = engine(speculative, **settings)
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts[:5]], [*FOUR, GREEDY], lora_request=who, use_tqdm=False)
        results.append([list(o.outputs[0].token_ids) for o in outputs])
    assert results[0] == results[1]
    base = tokens(run(engine(), prompts[:5], [*FOUR, GREEDY]))
    print([a == b for a, b in zip(base, results[0])])
