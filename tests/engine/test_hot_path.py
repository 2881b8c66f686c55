"""A round's own work: under ``FakeTensorMode``, where any host read and any shape from a value raises; with poison in
what pads a graph; and again and again, without memory that grows."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from drafts import HEADS, random_head
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState
from vllm.v1.worker.gpu.sample.thinking_budget import ThinkingBudgetState
from vllm.v1.worker.gpu.spec_decode.utils import DraftTokensHandler

from vllm_dartree.engine import sampler as sampler_module
from vllm_dartree.engine.attention import _GraphRows, _rows_of_chains, _rows_of_trees
from vllm_dartree.engine.commit import CachedLayer, commit_rows
from vllm_dartree.engine.kv_layout import KVLayout, PagedLayout
from vllm_dartree.engine.path_processors import PathBadWords, PathProcessors
from vllm_dartree.engine.runner import TreeDraftsHandler
from vllm_dartree.engine.sampler import TreeSampler
from vllm_dartree.engine.state import TreeState
from vllm_dartree.tree import DraftTree, TreeConfig, draft_block, expand, prune, walk

REQUESTS, BUDGET, DEPTH = 4, 16, 7


class _MovesByIndex(KVLayout):
    """A cache of one row per slot; a skipped pair copies slot 0 onto itself."""

    def attend(self, *args: object) -> None:
        raise AssertionError("nothing is verified here")

    def move(self, kv_caches, source, destination) -> None:
        moves = source >= 0
        for cache in kv_caches:
            cache[destination.where(moves, 0).flatten()] = cache[source.where(moves, 0).flatten()]


def _batch(num_drafts: list[int], prefill: int) -> SimpleNamespace:
    """An input batch whose first request still has ``prefill`` tokens in front of its rows."""
    rows = np.array(num_drafts) + 1
    scheduled = rows + np.array([prefill, *[0] * (len(rows) - 1)])
    ends = np.cumsum(scheduled)
    bounds = np.array([0, *np.cumsum(rows)])
    return SimpleNamespace(
        num_reqs=len(rows),
        has_structured_output_reqs=True,
        num_tokens=int(ends[-1]),
        cu_num_logits=torch.tensor(bounds.tolist(), dtype=torch.int32),
        cu_num_logits_np=bounds,
        logits_indices=torch.tensor([t for end, n in zip(ends, rows, strict=True) for t in range(end - n, end)]),
        expanded_local_pos=torch.tensor([i for n in rows for i in range(n)], dtype=torch.int32),
        expanded_idx_mapping=torch.tensor([request for request, n in enumerate(rows) for _ in range(n)]),
        idx_mapping=torch.arange(len(rows)),
        idx_mapping_np=np.arange(len(rows)),
        positions=torch.arange(int(ends[-1])),
        input_ids=torch.zeros(int(ends[-1]), dtype=torch.int32),
        seq_lens=torch.tensor(ends.tolist(), dtype=torch.int32),
        seq_lens_cpu_upper_bound=SimpleNamespace(numpy=lambda: ends),  # on the host
    )


class _Round:
    """The tree stage over persistent buffers, as vLLM's draft graph holds it, with a head of random weights."""

    def __init__(self, kind: str = "domino", variant: str = "pruned", requests: int = REQUESTS) -> None:
        torch.manual_seed(0)
        self.config = TreeConfig(budget=BUDGET, width=4, candidates=8, variant=variant)
        self.widths = self.config.widths(DEPTH)
        self.head = random_head(kind, 40, 6, torch.randn)
        self.anchor = torch.randint(40, (requests,))
        self.hidden, self.logits = torch.randn(requests, DEPTH, 6), torch.randn(requests, DEPTH, 40)
        self.state = TreeState(requests, BUDGET, len(self.widths), torch.device("cpu"))
        self.slots = torch.arange(requests)

    def propose(self) -> torch.Tensor:
        block = draft_block(self.anchor, self.hidden, self.logits, self.config.candidates)
        supertree = expand(self.head, block, self.widths)
        return self.state.write(self.slots, prune(supertree, BUDGET, self.config.depth_bonus))


def _processors(vocabulary: int) -> list[object]:
    """vLLM's states that look at the text before a row, as far as trees read them; every request has all."""

    def of(kind: type, **state: object) -> object:
        processor = object.__new__(kind)
        vars(processor).update(state)
        return processor

    def buffer(*shape: int, dtype: torch.dtype = torch.int32) -> SimpleNamespace:
        host = np.ones(shape, dtype=np.int32)
        return SimpleNamespace(gpu=torch.zeros(REQUESTS, *shape[1:], dtype=dtype), np=host)

    everyone = np.ones(REQUESTS, dtype=bool)
    texts = SimpleNamespace(all_token_ids=buffer(REQUESTS, 50), total_len=buffer(REQUESTS), prompt_len=buffer(REQUESTS))
    factors = {f"{name}_penalty": buffer(REQUESTS, dtype=torch.float32) for name in ("repetition", "frequency")}
    markers = {name: torch.zeros(2, dtype=torch.int32) for name in ("start", "end")}
    cached = torch.zeros(REQUESTS, dtype=torch.int32)
    return [
        of(
            PenaltiesState,
            use_penalty=everyone,
            **factors,
            presence_penalty=factors["frequency_penalty"],
            output_bin_counts=torch.zeros(REQUESTS, vocabulary, dtype=torch.int32),
        ),
        of(
            BadWordsState,
            num_bad_words=buffer(REQUESTS),
            bad_word_token_ids=buffer(REQUESTS, 12),
            bad_word_offsets=buffer(REQUESTS, 4),
            req_states=texts,
        ),
        of(
            ThinkingBudgetState,
            enabled=True,
            use_thinking_budget=everyone,
            thinking_token_budget=buffer(REQUESTS),
            cached_last_start=cached,
            cached_last_end=cached,
            reasoning_start_token_ids=markers["start"],
            reasoning_end_token_ids=markers["end"],
            natural_reasoning_end_token_ids=markers["end"],
            req_states=texts,
        ),
    ]


def _sampler(state: TreeState, vocabulary: int) -> TreeSampler:
    """On a stand-in for vLLM's sampler, whose kernels cannot run on fake tensors."""
    *processors, thinking = _processors(vocabulary)
    native = SimpleNamespace(logits_processors=processors, thinking_budget_state=thinking)

    def sample(logits, expanded_idx_mapping, idx_mapping, idx_mapping_np, pos, input_ids, local_pos, *args, **kwargs):
        ctx = LogitsContext(expanded_idx_mapping, idx_mapping, idx_mapping_np, local_pos, input_ids, pos, None)
        for processor in (*processors, thinking):
            assert processor.paths is not None
            processor.apply(logits, ctx)
        return logits.argmax(-1), logits

    sampler = object.__new__(TreeSampler)
    sampler.state, sampler.processors = state, PathProcessors(native)
    for processor in sampler.processors.processors:
        if isinstance(processor, PathBadWords):
            processor.longest[:] = 3
    sampler.sampler = SimpleNamespace(
        compute_nans=False,
        logprobs_mode="raw_logprobs",
        get_logprobs_dims=lambda slots: (2, 0),
        logprob_token_ids_state=None,
        sample=sample,
        req_states=SimpleNamespace(prefill_len=SimpleNamespace(gpu=torch.zeros(REQUESTS, dtype=torch.int32))),
    )
    return sampler


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("variant", ["pruned", "fixed", "chain"])
def test_a_whole_round_never_reads_the_device(kind, variant, monkeypatch):
    monkeypatch.setattr(
        sampler_module, "get_num_sampled_and_rejected", lambda num_sampled, *args: (num_sampled, num_sampled)
    )
    scored = []
    monkeypatch.setattr(
        sampler_module, "compute_topk_scores", lambda logits, *args, **kwargs: scored.append(logits.shape)
    )
    for native in (PenaltiesState, ThinkingBudgetState):
        monkeypatch.setattr(native, "apply", lambda self, logits, ctx: logits)  # kernels of vLLM's
    with FakeTensorMode():
        round_ = _Round(kind, variant)
        assert round_.propose().shape == (REQUESTS, BUDGET)
        drafts = [BUDGET, 3, 0, BUDGET]
        batch = _batch(drafts, prefill=5)
        step = round_.state.begin_step(batch, torch.zeros(REQUESTS, dtype=torch.int32))
        metadata = SimpleNamespace(
            num_reqs=REQUESTS,
            max_seq_len=40,
            block_table_tensor=torch.zeros(REQUESTS, 8, dtype=torch.int32),
            query_start_loc=torch.zeros(REQUESTS + 1, dtype=torch.int32),
            seq_lens=batch.seq_lens,
        )
        graph = _GraphRows(REQUESTS + 2, BUDGET + 1, torch.device("cpu"))
        graph.fill(_rows_of_trees(step, metadata, 16))
        graph.fill(_rows_of_chains(BUDGET + 1, metadata, 16))
        logits = torch.zeros(step.tokens.shape[0], 40)
        output = _sampler(round_.state, 40)(logits, batch)
        assert output.sampled_token_ids.shape == (REQUESTS, len(round_.widths) + 1)
        assert scored == [(sum(min(count, len(round_.widths)) + 1 for count in drafts), 40)]
        handed = []
        handler = object.__new__(TreeDraftsHandler)
        handler.trees = round_.state
        monkeypatch.setattr(
            DraftTokensHandler, "set_draft_tokens", lambda self, batch, packed: handed.append(packed.shape)
        )
        handler.set_draft_tokens(batch, torch.zeros(REQUESTS, BUDGET, dtype=torch.int32))
        assert handed == [(REQUESTS, BUDGET)]
        layers = [
            CachedLayer(str(i), SimpleNamespace(kv_cache=torch.zeros(9, 2, 16, 8)), PagedLayout(use_triton=False))
            for i in range(2)
        ]
        slots = dict.fromkeys("01", torch.arange(batch.num_tokens))
        (moved,) = commit_rows(step, layers, slots, batch.positions, [torch.zeros(batch.num_tokens, 8)])
        assert moved.shape == (batch.num_tokens, 8)
        with pytest.raises(Exception, match=r"item|data-dependent|aten\._local_scalar_dense"):
            moved.sum().item()


@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize("kind", ["domino", "markov"])
def test_rows_that_pad_a_graph_change_nothing(kind, kernels, monkeypatch):
    monkeypatch.setenv("DARTREE_KERNELS", kernels)
    alone, padded = _Round(kind, requests=3), _Round(kind, requests=5)
    for name in ("anchor", "hidden", "logits"):
        getattr(padded, name)[:3] = getattr(alone, name)
    # What a graph finds behind its batch: old numbers, or none at all, and nobody's slots.
    padded.head, padded.slots = alone.head, torch.tensor([0, 1, 2, -1, -1])
    padded.hidden[3:], padded.logits[3:] = float("nan"), float("inf")
    padded.logits[4] = float("nan")
    padded.state.as_chain[[1, -1]] = alone.state.as_chain[1] = True
    for tensor in (padded.state.parents, padded.state.depths):
        tensor[3] = 77
    assert torch.equal(padded.propose()[:3], alone.propose())
    for name in ("parents", "depths", "ancestors"):
        assert torch.equal(getattr(padded.state, name)[:3], getattr(alone.state, name)[:3])
    assert (padded.state.parents[3] == 77).all(), "a padding row was written to a request's slot"
    assert (padded.state.depths[3] == 77).all()


def test_a_graph_reads_no_rows_of_requests_that_pad_it():
    round_ = _Round(requests=3)
    round_.propose()
    batch = _batch([BUDGET, 3, 0], prefill=0)
    step = round_.state.begin_step(batch, torch.zeros(3, dtype=torch.int32))
    block_table = torch.arange(40, dtype=torch.int32).view(5, 8)
    rows = _rows_of_trees(step, SimpleNamespace(max_seq_len=40, block_table_tensor=block_table[:3]), 16)
    graph = _GraphRows(5, BUDGET + 1, torch.device("cpu"))
    for name in ("first_tokens", "num_rows", "roots", "depths"):
        getattr(graph, name).fill_(-999)
    buffers = {name: buffer.data_ptr() for name, buffer in vars(graph).items()}
    graph.fill(rows)
    views = graph.views(5, block_table)
    assert views.num_rows.tolist() == [BUDGET + 1, 4, 1, 0, 0]
    for name in ("first_tokens", "roots", "ancestors", "depths"):
        assert torch.equal(getattr(views, name)[:3], getattr(rows, name))
    assert {name: buffer.data_ptr() for name, buffer in vars(graph).items()} == buffers


class _Storages(TorchDispatchMode):
    """All memory that operations return, as long as it lives."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for out in result if isinstance(result, tuple | list) else [result]:
            if isinstance(out, torch.Tensor):
                reference = StorageWeakRef(out.untyped_storage())
                self.seen[reference.cdata] = reference
        return result

    def num_alive(self) -> int:
        return sum(not reference.expired() for reference in self.seen.values())


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_rounds_leave_no_memory_behind(kernels, monkeypatch):
    monkeypatch.setenv("DARTREE_KERNELS", kernels)
    round_ = _Round(requests=1)
    cache = torch.zeros(9, 2, 16, 8)
    layer = CachedLayer("layer", SimpleNamespace(kv_cache=cache), PagedLayout(kernels == "triton"))
    buffers = [round_.state.parents, round_.state.depths, round_.state.ancestors]
    places, alive = [buffer.data_ptr() for buffer in buffers], []
    with _Storages() as storages:
        for _ in range(3):
            drafted = round_.propose()
            batch = _batch([BUDGET], prefill=0)
            step = round_.state.begin_step(batch, torch.zeros(1, dtype=torch.int32))
            step.accepted = walk(drafted, step.parents, step.topology, step.padded(step.rows), DEPTH, step.num_nodes)
            commit_rows(step, [layer], {"layer": torch.arange(batch.num_tokens)}, batch.positions, None)
            alive.append(storages.num_alive())
    assert len(storages.seen) > 20
    assert alive[1] == alive[2]
    assert [buffer.data_ptr() for buffer in buffers] == places


def test_positions_follow_depths_and_placeholders_stay_sequential():
    state = TreeState(2, 4, 3, torch.device("cpu"))
    tree = DraftTree(
        torch.tensor([[5, 6, 7, 8]] * 2),
        torch.tensor([[0, 0, 0, 1, 3]] * 2),
        torch.tensor([[-1.0, -2.0, -3.0, -4.0]] * 2),
    )
    state.write(torch.tensor([0, 1]), tree)
    batch = _batch([4, 4], prefill=0)
    batch.positions = torch.tensor([10, 11, 12, 13, 14, 20, 21, 22, 23, 24])
    # The second request's anchor lies in its prefill: its drafts are placeholders.
    step = state.begin_step(batch, torch.tensor([8, 21]))
    assert batch.positions.tolist() == [10, 11, 11, 12, 13, 20, 21, 22, 23, 24]
    assert step.num_nodes.tolist() == [4, 0]
    assert step.verify_only


def test_rows_of_the_path_move_left_over_each_other_and_all_else_stays():
    state = TreeState(2, 4, 3, torch.device("cpu"))
    tree = DraftTree(
        torch.tensor([[5, 6, 7, 8]] * 2),
        torch.tensor([[0, 0, 0, 2, 3]] * 2),
        torch.tensor([[-1.0, -2.0, -3.0, -4.0]] * 2),
    )
    state.write(torch.tensor([0, 1]), tree)
    batch = _batch([4, 4], prefill=3)
    sequential = batch.positions.clone()
    step = state.begin_step(batch, torch.tensor([0, 0]))
    # The first request accepts rows 2, 3 and 4; the second nothing.
    chosen = torch.tensor([[6, 0, 7, 8, 1], [9, 9, 9, 9, 9]])
    step.accepted = walk(tree.tokens, step.parents, step.topology, chosen, 3, step.num_nodes)
    cache, hidden = torch.arange(13.0).view(13, 1), torch.arange(13.0).view(13, 1)
    layer = CachedLayer("layer", SimpleNamespace(kv_cache=cache.clone()), _MovesByIndex())
    kept = step.accepted.path[0]
    assert kept.tolist() == [0, 2, 3, 4]
    moved = commit_rows(step, [layer], {"layer": torch.arange(13)}, batch.positions, [hidden])
    expected = [0, 1, 2, 3, 5, 6, 7, 7, 8, 9, 10, 11, 12]
    assert moved[0].flatten().tolist() == expected
    assert layer.attention.kv_cache.flatten().tolist() == expected
    assert torch.equal(batch.positions, sequential)
