"""Features of the engine, and targets of many kinds: with trees every one says what it says without."""

from contextlib import contextmanager

import pytest
import torch
from engine import targets
from engine.engines import asynchronous_scheduling, counted, dartree, engine, recorded, run, runner, tokens
from vllm import SamplingParams
from vllm.distributed import parallel_state
from vllm.lora.request import LoRARequest
from vllm.model_executor.models.qwen3 import Qwen3DecoderLayer, Qwen3Model
from vllm.v1.attention.backend import AttentionType

from vllm_dartree.assets import TARGET
from vllm_dartree.engine.attention import install_tree_attention
from vllm_dartree.engine.state import TreeState, TreeStep
from vllm_dartree.features import DartreeConfigError
from vllm_dartree.kernels import use_triton

GREEDY = SamplingParams(temperature=0, max_tokens=24)
SAMPLED = SamplingParams(temperature=1.0, seed=5, max_tokens=24)
FOUR = [GREEDY, SAMPLED, GREEDY, SamplingParams(temperature=0.7, top_p=0.9, seed=6, max_tokens=24)]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("targets")


# --- The scheduler ---------------------------------------------------------------------------------------------------


@contextmanager
def cache_hits(llm):
    """Appends ``(queried, hit)`` tokens of the block."""
    seen, totals = [], [0, 0]

    def count(scheduler_stats, iteration_stats) -> None:
        if scheduler_stats:
            totals[0] += scheduler_stats.prefix_cache_stats.queries
            totals[1] += scheduler_stats.prefix_cache_stats.hits

    with recorded(llm, count):
        yield seen
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
    assert seen[:4] == seen[4:]
    assert seen[3][1] > 0


def test_dynamic_budget_by_batch_size(prompts, monkeypatch):
    schedule = [[1, 1, 16], [2, 2, 5], [3, 3, 1], [4, 8, 0]]
    trees = engine(dartree(num_speculative_tokens_per_batch_size=schedule))
    expected = tokens(run(engine(), prompts[:4], FOUR))
    for every in (0, 3):
        assert tokens(run(trees, prompts[:4], FOUR, arrive_every=every)) == expected
    native, most = TreeState.begin_step, {}

    def watched(*args: object) -> TreeStep:
        step = native(*args)
        num_reqs = step.roots.shape[0]
        most[num_reqs] = max(most.get(num_reqs, 0), int(step.num_nodes.max()))
        return step

    monkeypatch.setattr(TreeState, "begin_step", watched)
    for count in (1, 2, 3):
        run(trees, prompts[:count], GREEDY)
    assert most == {1: 16, 2: 5, 3: 1}


def test_more_requests_than_places(prompts):
    params = SamplingParams(temperature=0, max_tokens=6)
    trees = engine(dartree())
    assert trees.llm_engine.vllm_config.scheduler_config.max_num_seqs < 36
    assert tokens(run(trees, prompts[:36], params)) == tokens(run(engine(), prompts[:36], params))


def test_priorities_with_preemption(prompts):
    # Six blocks of 128 tokens, for requests that grow into their second one.
    settings = {"kv_cache_memory_bytes": 3 << 20, "max_num_seqs": 8, "max_model_len": 256}
    params, priorities = SamplingParams(temperature=0, max_tokens=110), [3, 2, 2, 1, 0]
    ask = [{"prompt_token_ids": prompt} for prompt in prompts[:5]]
    trees = engine(dartree(), scheduling_policy="priority", **settings)
    core, finished = trees.llm_engine, {}
    with counted(trees) as drafts:
        for i, (prompt, priority) in enumerate(zip(ask, priorities, strict=True)):
            core.add_request(str(i), prompt, params, priority=priority)
            core.step()
        while core.has_unfinished_requests():
            for output in core.step():
                if output.finished:
                    finished[int(output.request_id)] = list(output.outputs[0].token_ids)
    assert [finished[i] for i in range(5)] == tokens(run(engine(), prompts[:5], params))
    assert drafts.preemptions > 0
    assert list(finished)[-1] == 0


def test_asynchronous_scheduling(prompts):
    with asynchronous_scheduling():
        trees = engine(dartree(), async_scheduling=True)
    assert trees.llm_engine.vllm_config.scheduler_config.async_scheduling
    expected = tokens(run(engine(), prompts[:4], FOUR))
    for every in (0, 2):
        with counted(trees) as drafts:
            assert tokens(run(trees, prompts[:4], FOUR, arrive_every=every)) == expected
        assert drafts.tau > 2


def test_reloaded_weights(prompts, folder):
    # On a CPU vLLM's reload leaves a tied head as it was, so this is for one that is not.
    before, after = targets.untied(folder / "untied"), targets.untied(folder / "untied2", seed=2)
    plain, trees, fresh = engine(model=before), engine(dartree(), model=before), engine(dartree(), model=after)
    expected = tokens(run(plain, prompts[:2], GREEDY))
    with counted(fresh) as wanted:
        reloaded = tokens(run(fresh, prompts[:2], GREEDY))
    assert reloaded != expected
    for llm in (plain, trees):
        llm.collective_rpc("reload_weights", kwargs={"weights_path": after})
    assert tokens(run(plain, prompts[:2], GREEDY)) == reloaded
    # The drafter shares the target's embedding and head, and they are the new ones.
    with counted(trees) as drafts:
        assert tokens(run(trees, prompts[:2], GREEDY)) == reloaded
    assert drafts == wanted
    for llm in (plain, trees):
        llm.collective_rpc("reload_weights", kwargs={"weights_path": before})
    assert tokens(run(trees, prompts[:2], GREEDY)) == expected


def test_dummy_weights(prompts):
    # All tokens are as good as each other to such a model; it is for measuring speed.
    settings = {"load_format": "dummy", "max_num_seqs": 4}
    expected = tokens(run(engine(**settings), prompts[:2], GREEDY))
    assert tokens(run(engine(dartree(), **settings), prompts[:2], GREEDY)) == expected


# --- Targets ---------------------------------------------------------------------------------------------------------


def assert_same(target: str, prompts, tau: float = 2.0, **settings):
    """With trees, a target says what it says without; returns both."""
    expected = tokens(run(engine(model=target, **settings), prompts[:4], FOUR))
    trees = engine(dartree(), model=target, **settings)
    with counted(trees) as drafts:
        assert tokens(run(trees, prompts[:4], FOUR)) == expected
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
    expected, _ = assert_same(targets.moe(folder / "moe"), prompts)
    assert expected != tokens(run(engine(), prompts[:4], FOUR))


@pytest.mark.parametrize(("head_size", "num_heads", "num_kv_heads"), [(64, 12, 2), (96, 6, 6)])
def test_heads_of_other_sizes_and_numbers(prompts, folder, head_size, num_heads, num_kv_heads):
    target = targets.with_heads(folder / str(head_size), head_size, num_heads, num_kv_heads)
    trees = engine(dartree(), model=target)
    assert runner(trees).speculator.cached_layers[0].attention.head_size == head_size
    with counted(trees) as drafts:
        # It computes the same as the bundled target.
        assert tokens(run(trees, prompts[:4], FOUR)) == tokens(run(engine(), prompts[:4], FOUR))
    assert drafts.tau > 2


class CappedLayer(Qwen3DecoderLayer):
    """As in Gemma2, which hands out no hidden states."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.self_attn.attn.impl.logits_soft_cap = 8.0


def test_a_soft_cap_of_the_attention_logits(prompts, monkeypatch):
    uncapped = tokens(run(engine(), prompts[:4], FOUR))
    monkeypatch.setattr(Qwen3Model, "decoder_layer_type", CappedLayer)
    # Settings that no other test has, since engines are shared by them.
    expected, _ = assert_same(str(TARGET), prompts, max_num_seqs=9)
    assert expected != uncapped


def test_adapters_beside_the_base(prompts, folder):
    first, second = (LoRARequest(f"adapter {i}", i, targets.adapter(folder / f"adapter{i}", i)) for i in (1, 2))
    whose, params = [None, first, second, first, None], [*FOUR, GREEDY]
    settings = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    trees = engine(dartree(), **settings)

    def say(llm) -> list[list[int]]:
        ask = [{"prompt_token_ids": prompt} for prompt in prompts[:5]]
        outputs = llm.generate(ask, params, lora_request=whose, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    expected = say(engine(**settings))
    with counted(trees) as drafts:
        assert say(trees) == expected
    assert drafts.accepted > drafts.rounds
    base = tokens(run(engine(), prompts[:5], params))
    assert [one == other for one, other in zip(expected, base, strict=True)][2:] == [False, False, True]


# --- Refused by what only a loaded layer tells -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("owner", "name", "value", "words"),
    [
        ("layer", "kv_sharing_target_layer_name", "model.layers.0.self_attn.attn", "cross-layer KV sharing"),
        ("layer", "kv_cache_dtype", "fp8", "a quantised KV cache"),
        ("layer", "head_size_v", 16, "values of another size than its keys"),
        ("layer", "attn_type", AttentionType.ENCODER_ONLY, "attention of type"),
        ("impl", "sinks", torch.zeros(6), "attention sinks"),
        ("impl", "alibi_slopes", torch.zeros(6), "ALiBi"),
        ("impl", "chunk_lookback", 1, "chunked local attention"),
        ("backend", "forward_includes_kv_cache_update", True, "a backend that writes its cache within forward"),
        (
            "backend",
            "get_name",
            staticmethod(lambda: "FLEX_ATTENTION"),
            "FLEX_ATTENTION, on which method 'dartree' can",
        ),
    ],
)
def test_layers_that_trees_cannot_verify_are_refused(monkeypatch, owner, name, value, words):
    trees = runner(engine(dartree()))
    speculator = trees.speculator
    layer = speculator.cached_layers[0].attention
    owner = {"layer": layer, "impl": layer.impl, "backend": layer.attn_backend}[owner]
    monkeypatch.setattr(owner, name, value, raising=False)
    with pytest.raises(DartreeConfigError, match=words):
        install_tree_attention(trees.vllm_config, speculator.draft_attn_layer_names, speculator.trees)


def test_kernels_that_there_are_not_are_refused(monkeypatch):
    monkeypatch.setenv("DARTREE_KERNELS", "cuda")
    with pytest.raises(ValueError, match="DARTREE_KERNELS is 'cuda'; it must be 'triton' or 'torch'"):
        use_triton(torch.device("cpu"))
