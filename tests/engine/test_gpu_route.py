"""The way a round takes on a GPU, on this CPU: vLLM's TRITON_ATTN, its paged cache and the Triton kernels.

It is all interpreted, hence slow, so prompts and outputs are tiny.
"""

import pytest
import torch
from engine.engines import counted, dartree, engine, run, runner, tokens
from vllm import LLM, SamplingParams
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention import selector
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.ops.triton_unified_attention import unified_attention

from vllm_dartree.assets import TARGET
from vllm_dartree.engine.attention import _GraphRows
from vllm_dartree.engine.kv_layout import PagedLayout
from vllm_dartree.engine.state import TreeState, TreeStep
from vllm_dartree.kernels.kv_move import move_slots
from vllm_dartree.kernels.tree_attention import tree_attention
from vllm_dartree.tree import topology

pytestmark = pytest.mark.slow

PARAMS = [SamplingParams(temperature=0, max_tokens=12), SamplingParams(temperature=1.0, seed=5, max_tokens=12)]


@pytest.fixture(scope="module")
def short_prompts(prompts) -> list[list[int]]:
    return [prompt[:24] for prompt in sorted(prompts, key=len)[:2]]


@pytest.fixture(scope="module")
def expected(short_prompts) -> list[list[int]]:
    """Tokens without speculation, on CPU_ATTN."""
    return tokens(run(engine(), short_prompts, PARAMS))


@pytest.fixture(scope="session")
def engine_of_a_gpu() -> LLM:
    """An engine on TRITON_ATTN with the Triton kernels of this package.

    Only its start sees the disguised platform, so that engines which other tests share keep CPU_ATTN. It lives as long
    as they do, since an engine that goes takes the process's distributed groups with it.
    """
    with pytest.MonkeyPatch.context() as disguise:
        path = AttentionBackendEnum.TRITON_ATTN.get_path()
        disguise.setattr(CpuPlatform, "get_attn_backend_cls", classmethod(lambda cls, *args, **kwargs: path))
        disguise.setattr(torch.cuda, "get_device_capability", lambda *args: (8, 0))
        disguise.setenv("DARTREE_KERNELS", "triton")
        selector._cached_get_attn_backend.cache_clear()
        llm = LLM(
            str(TARGET),
            dtype="float32",
            enforce_eager=True,
            max_model_len=128,
            max_num_seqs=2,
            max_num_batched_tokens=64,
            kv_cache_memory_bytes=16 << 20,
            enable_prefix_caching=False,
            speculative_config=dartree(8, tree_width=4),
        )
        selector._cached_get_attn_backend.cache_clear()
    return llm


@pytest.fixture
def gpu_route(engine_of_a_gpu, monkeypatch) -> LLM:
    # vLLM's cache writes ask for it at every step.
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: (8, 0))
    # The layers keep the kernels that they were made with; the tree stage asks at every step.
    monkeypatch.setenv("DARTREE_KERNELS", "triton")
    return engine_of_a_gpu


def test_the_route_is_the_one_of_a_gpu(gpu_route):
    layers = runner(gpu_route).speculator.cached_layers
    assert layers
    for layer in layers:
        assert layer.attention.attn_backend.get_name() == "TRITON_ATTN"
        assert isinstance(layer.layout, PagedLayout)
        assert layer.layout._attend is tree_attention
        assert layer.layout._move is move_slots


def test_tokens_equal_those_without_speculation(gpu_route, short_prompts, expected, monkeypatch):
    steps: list[TreeStep] = []
    native = TreeState.begin_step

    def watched(*args: object) -> TreeStep:
        steps.append(native(*args))
        return steps[-1]

    monkeypatch.setattr(TreeState, "begin_step", watched)
    # The second request arrives while the first is verified, so one batch holds both a tree and a prompt.
    assert tokens(run(gpu_route, short_prompts, PARAMS, arrive_every=2)) == expected
    assert {step.verify_only for step in steps} == {True, False}
    assert sum(int(step.accepted.num_accepted.sum()) for step in steps) > len(steps)


def test_the_kernels_of_the_tree_stage_give_the_same_tokens(prompts, monkeypatch):
    ask = {"temperature": 0, "max_tokens": 12}
    params = [SamplingParams(**ask), SamplingParams(**ask, repetition_penalty=1.5, bad_words=["cold-cable", "cold"])]
    asked = prompts[1:4:2]  # prompts of odd numbers leave most to the model
    expected = tokens(run(engine(), asked, params))
    assert expected[1] != tokens(run(engine(), asked, params[0]))[1], "penalties and bad words change nothing"
    llm = engine(dartree())
    with counted(llm) as with_twins:
        assert tokens(run(llm, asked, params)) == expected
    monkeypatch.setenv("DARTREE_KERNELS", "triton")
    with counted(llm) as with_kernels:
        assert tokens(run(llm, asked, params)) == expected
    assert with_kernels.accepted == with_twins.accepted > 0


def _builders(llm: LLM) -> list:
    """The metadata builders of the target's layers."""
    groups = [group for groups in runner(llm).attn_groups for group in groups]
    builders = [group.get_metadata_builder(0) for group in groups]
    return [builder for builder in builders if hasattr(builder, "graph_rows")]


def test_graphs_are_kept_for_uniform_batches(gpu_route):
    (builder,) = _builders(gpu_route)
    base = type(builder).__bases__[0]
    arguments = (builder.vllm_config, builder.kv_cache_spec)
    assert base.get_cudagraph_support(*arguments) == AttentionCGSupport.ALWAYS
    assert builder.get_cudagraph_support(*arguments) == AttentionCGSupport.UNIFORM_BATCH


def test_a_graph_finds_each_step_in_its_buffers(prompts, monkeypatch):
    """What a replay would compute, without a graph: verify rows are read from the buffers and from nothing else."""
    params = SamplingParams(temperature=0, max_tokens=24)
    expected = tokens(run(engine(), prompts[:3], params, arrive_every=3))
    llm = engine(dartree())
    (builder,) = _builders(llm)
    state = runner(llm).speculator.trees
    buffers = _GraphRows(16, state.budget + 1, torch.device("cpu"))
    buffers.num_rows.fill_(3)
    buffers.ancestors.fill_(True)
    native, replayed = builder.build, []

    def build_and_replay(common_prefix_len, common_attn_metadata, *args):
        metadata = native(common_prefix_len, common_attn_metadata, *args)
        if common_attn_metadata.max_query_len <= state.budget + 1 and (state.step is None or state.step.verify_only):
            metadata.verify_rows = buffers.views(common_attn_metadata.num_reqs, common_attn_metadata.block_table_tensor)
            replayed.append(state.step is not None)
            assert not buffers.num_rows[common_attn_metadata.num_reqs :].any()
        return metadata

    monkeypatch.setattr(builder, "graph_rows", buffers)
    monkeypatch.setattr(builder, "build", build_and_replay)
    assert tokens(run(llm, prompts[:3], params, arrive_every=3)) == expected
    assert True in replayed


def test_a_batch_without_drafts_is_a_chain_in_the_buffers(prompts, monkeypatch):
    prompt = prompts[0][:12]
    expected = tokens(run(engine(), [prompt], PARAMS[0]))
    llm = engine(dartree())
    (builder,) = _builders(llm)
    buffers = _GraphRows(16, 17, torch.device("cpu"))
    native, captures = builder.build, []

    def build_for_capture(common_prefix_len, common_attn_metadata, *args):
        monkeypatch.setattr(builder, "build", native)
        metadata = builder.build_for_cudagraph_capture(common_attn_metadata)
        captures.append(metadata.verify_rows)
        return metadata

    monkeypatch.setattr(builder, "graph_rows", buffers)
    # The prompt is short enough for a graph, which is captured and replayed in one go.
    monkeypatch.setattr(builder, "build", build_for_capture)
    assert tokens(run(llm, [prompt], PARAMS[0])) == expected
    (rows,) = captures
    assert rows.verify_only
    assert rows.ancestors.data_ptr() == buffers.ancestors.data_ptr()


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("soft_cap", [None, 2.0])
def test_a_chain_is_attended_as_by_vllms_own_kernel(window, soft_cap):
    roots, rows, kv_heads, groups, head_size, block_size = [40, 3], 6, 2, 2, 32, 16
    kv_cache = torch.randn(9, block_size, kv_heads, 2 * head_size)  # as bound by vLLM, but for the order of axes
    query = torch.randn(len(roots) * rows, kv_heads * groups, head_size)
    block_table = (torch.randperm(8) + 1).view(2, 4).to(torch.int32)
    length = torch.tensor(roots) + rows
    expected, actual = torch.zeros_like(query), torch.zeros_like(query)
    unified_attention(
        q=query,
        k=kv_cache[..., :head_size],
        v=kv_cache[..., head_size:],
        out=expected,
        cu_seqlens_q=torch.tensor([0, rows, 2 * rows], dtype=torch.int32),
        max_seqlen_q=rows,
        seqused_k=length.to(torch.int32),
        max_seqlen_k=int(length.max()),
        softmax_scale=0.3,
        causal=True,
        window_size=(-1, -1) if window is None else (window - 1, 0),
        block_table=block_table,
        softcap=soft_cap or 0,
        q_descale=None,
        k_descale=None,
        v_descale=None,
    )
    chain = topology(torch.arange(rows).expand(2, -1) - 1)
    tree_attention(
        query,
        *kv_cache.transpose(1, 2).chunk(2, dim=-1),
        actual,
        block_table,
        torch.tensor([0, rows]),
        torch.tensor([rows, rows]),
        torch.tensor(roots),
        chain.ancestors,
        chain.depths,
        0.3,
        window,
        soft_cap,
    )
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
