"""The kernel of the verify rows against its twin, and the twin against plain causal attention."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vllm_dartree.kernels.tree_attention import tree_attention, tree_attention_torch
from vllm_dartree.tree import topology

NAN = float("nan")


@dataclass
class Batch:
    """Trees of several requests over a paged cache in which all that no row may see is NaN."""

    query: Tensor  # [num_tokens, num_heads, D]
    kv_cache: Tensor  # [num_blocks, num_kv_heads, block_size, 2 * D]
    block_table: Tensor  # [R, max_blocks] int32
    first_tokens: Tensor  # [R] int64
    num_rows: Tensor  # [R] int64
    roots: Tensor  # [R] int64
    parents: Tensor  # [R, N] int64
    ancestors: Tensor  # [R, N, N] bool
    depths: Tensor  # [R, N] int64

    def attended(self, attention, **options: object) -> Tensor:
        """``[num_tokens, num_heads, D]``; 7 where nothing was written."""
        out = torch.full_like(self.query, 7)
        keys, values = self.kv_cache.chunk(2, dim=-1)
        attention(
            self.query,
            keys,
            values,
            out,
            self.block_table,
            self.first_tokens,
            self.num_rows,
            self.roots,
            self.ancestors,
            self.depths,
            self.query.shape[-1] ** -0.5,
            **options,
        )
        return out

    def content(self, request: int) -> tuple[Tensor, Tensor]:
        """Keys and values ``[num_kv_heads, root + num_rows, D]`` of a request."""
        length = int(self.roots[request] + self.num_rows[request])
        blocks = self.kv_cache[self.block_table[request].long()].transpose(0, 1).flatten(1, 2)
        return blocks[:, :length].chunk(2, dim=-1)


def random_parents(num_requests: int, num_rows: int, generator: torch.Generator, num_dead: int = 0) -> Tensor:
    """``[R, N]``: every node hangs on some row before it; the last ``num_dead`` are dead."""
    draws = torch.rand(num_requests, num_rows, generator=generator)
    parents = (draws * torch.arange(num_rows)).long()
    if num_dead:
        parents[:, -num_dead:] = -1
    return parents


def random_batch(
    roots: list[int],
    num_rows: list[int],
    max_rows: int,
    kv_heads: int = 2,
    groups: int = 2,
    head_size: int = 32,
    block_size: int = 16,
    window: int | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    slots_inside_heads: bool = True,
) -> Batch:
    """One request for each root. Other tokens stand between the requests' rows in the flat batch."""
    generator = torch.Generator().manual_seed(seed)
    num_requests, gap = len(roots), 2
    max_blocks = -(-(max(roots) + max_rows) // block_size) + 1
    num_blocks = num_requests * max_blocks + 1
    order = torch.randperm(num_blocks - 1, generator=generator) + 1  # block 0 is the null block
    block_table = order.view(num_requests, max_blocks).to(torch.int32)

    shape = (num_blocks, kv_heads, block_size, 2 * head_size)
    if not slots_inside_heads:
        shape = (num_blocks, block_size, kv_heads, 2 * head_size)
    kv_cache = torch.full(shape, NAN, dtype=dtype)
    if not slots_inside_heads:
        kv_cache = kv_cache.transpose(1, 2)
    for request, (root, rows) in enumerate(zip(roots, num_rows, strict=True)):
        # Blocks behind a sliding window are freed, and belong to somebody else.
        oldest = 0 if window is None else max(0, root - window + 1)
        position = torch.arange(oldest, root + rows)
        block = block_table[request, position // block_size].long()
        content = torch.randn(len(position), kv_heads, 2 * head_size, generator=generator)
        kv_cache[block, :, position % block_size] = content.to(dtype)

    parents = random_parents(num_requests, max_rows, generator, num_dead=max_rows // 8)
    shape = topology(parents)
    starts, num_tokens = [], 0
    for rows in num_rows:
        starts.append(num_tokens + gap)
        num_tokens += gap + rows
    return Batch(
        query=torch.randn(num_tokens + gap, kv_heads * groups, head_size, generator=generator).to(dtype),
        kv_cache=kv_cache,
        block_table=block_table,
        first_tokens=torch.tensor(starts),
        num_rows=torch.tensor(num_rows),
        roots=torch.tensor(roots),
        parents=parents,
        ancestors=shape.ancestors,
        depths=shape.depths,
    )


def assert_same(batch: Batch, num_splits: int = 1, tolerance: float = 2e-5, **options: object) -> None:
    expected = batch.attended(tree_attention_torch, **options)
    actual = batch.attended(tree_attention, num_splits=num_splits, **options)
    assert not expected.isnan().any()
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@settings(max_examples=25)
@given(data=st.data())
def test_kernel_equals_its_twin(data):
    num_requests, max_rows = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 12))
    window = data.draw(st.sampled_from([None, None, 1, 5, 40]))
    batch = random_batch(
        roots=[data.draw(st.integers(0, 90)) for _ in range(num_requests)],
        num_rows=[data.draw(st.integers(0, max_rows)) for _ in range(num_requests)],
        max_rows=max_rows,
        kv_heads=data.draw(st.integers(1, 2)),
        groups=data.draw(st.integers(1, 4)),
        head_size=data.draw(st.sampled_from([32, 64, 80, 128])),
        block_size=data.draw(st.sampled_from([16, 32, 48])),
        window=window,
        seed=data.draw(st.integers(0, 2**31)),
        slots_inside_heads=data.draw(st.booleans()),
    )
    assert_same(
        batch,
        num_splits=data.draw(st.sampled_from([1, 2, 4])),
        sliding_window=window,
        soft_cap=data.draw(st.sampled_from([None, 0.5, 30.0])),
    )


def test_kernel_equals_its_twin_at_the_default_budget():
    assert_same(random_batch([35, 0], [65, 20], 65, kv_heads=1, head_size=64), num_splits=2)


def test_kernel_equals_its_twin_in_half_precision():
    assert_same(random_batch([70, 5], [17, 3], 17, head_size=80, dtype=torch.float16), tolerance=2e-3)


def test_query_may_be_a_slice_of_a_wider_product():
    batch = random_batch([20], [5], 5)
    batch.query = torch.cat([batch.query, batch.query], dim=1)[:, :4]
    assert_same(batch)


@pytest.mark.parametrize("attention", [tree_attention, tree_attention_torch])
def test_a_chain_is_causal_attention(attention):
    root, rows = 37, 9
    batch = random_batch([root], [rows], rows)
    chain = topology(torch.arange(rows)[None] - 1)
    batch.ancestors, batch.depths = chain.ancestors, chain.depths
    tokens = slice(int(batch.first_tokens[0]), int(batch.first_tokens[0]) + rows)
    keys, values = batch.content(0)
    mask = torch.arange(root + rows) <= torch.arange(root, root + rows)[:, None]
    expected = F.scaled_dot_product_attention(
        batch.query[tokens].transpose(0, 1), keys, values, attn_mask=mask, enable_gqa=True
    )
    torch.testing.assert_close(batch.attended(attention)[tokens], expected.transpose(0, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("attention", [tree_attention, tree_attention_torch])
def test_each_row_is_plain_decoding_after_its_own_path(attention):
    root, rows, window = 30, 8, 12
    batch = random_batch([root], [rows], rows)
    attended = batch.attended(attention, sliding_window=window)
    keys, values = batch.content(0)
    for row in range(rows):
        path = [root + i for i in range(rows) if batch.ancestors[0, row, i]]
        seen = [*range(root), *path][-window:]
        token = int(batch.first_tokens[0]) + row
        expected = F.scaled_dot_product_attention(
            batch.query[token, :, None], keys[:, seen], values[:, seen], enable_gqa=True
        )
        torch.testing.assert_close(attended[token], expected[:, 0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("attention", [tree_attention, tree_attention_torch])
def test_only_the_rows_of_trees_are_written(attention):
    batch = random_batch([20, 9, 30], [3, 0, 7], 7)
    attended = batch.attended(attention)
    rows = torch.cat([first + torch.arange(n) for first, n in zip(batch.first_tokens, batch.num_rows, strict=True)])
    others = torch.ones(len(attended), dtype=torch.bool).index_fill(0, rows, False)
    assert (attended[others] == 7).all()
    assert (attended[rows] != 7).all()


@pytest.mark.parametrize("attention", [tree_attention, tree_attention_torch])
def test_a_plain_causal_mask_gives_another_result(attention):
    batch = random_batch([20], [8], 8)
    attended = batch.attended(attention)
    batch.ancestors = torch.ones_like(batch.ancestors).tril()
    assert (batch.attended(attention) - attended).abs().max() > 0.05


@pytest.mark.parametrize("attention", [tree_attention, tree_attention_torch])
def test_a_window_counts_depths_and_not_rows(attention):
    batch = random_batch([20], [8], 8)
    attended = batch.attended(attention, sliding_window=4)
    batch.depths = torch.arange(8)[None]
    assert (batch.attended(attention, sliding_window=4) - attended).abs().max() > 0.05


def test_a_cache_with_scattered_heads_is_refused():
    batch = random_batch([20], [8], 8)
    batch.kv_cache = batch.kv_cache.transpose(2, 3).contiguous().transpose(2, 3)
    with pytest.raises(ValueError, match="contiguous"):
        batch.attended(tree_attention)
