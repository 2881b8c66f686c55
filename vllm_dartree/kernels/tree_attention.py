"""Attention of verify rows: the committed context under no mask but a window, the tree under its ancestors.

The rows of a request follow each other in the flat batch. Key ``j < root`` belongs to the context, at position ``j``;
key ``root + i`` to tree row ``i``, at position ``root + depth[i]``; keys behind the tree are never seen, and neither
are keys that no row of the request sees: their slots may hold anything, NaN included.
"""

# ruff: noqa: N803 - Triton's compile-time arguments are written in capitals.

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOG2_E = math.log2(math.e)


def tree_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    out: Tensor,
    block_table: Tensor,
    first_tokens: Tensor,
    num_rows: Tensor,
    roots: Tensor,
    ancestors: Tensor,
    depths: Tensor,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    num_splits: int | None = None,
) -> None:
    """Writes the attention of the rows of ``R`` trees, of at most ``N`` rows each, into ``out``.

    Nothing is read back from the device and all launch sizes follow from shapes, so a CUDA graph may hold it; memory
    is allocated only where the context is split.

    Args:
        query: ``[num_tokens, num_heads, D]``, the flat batch; float32, bfloat16 or float16.
        key_cache: ``[num_blocks, num_kv_heads, block_size, D]``, any strides but the last.
        value_cache: as ``key_cache``.
        out: as ``query``; tokens that are no tree row are left alone.
        block_table: ``[R, max_blocks]`` int32, covering the rows of each request.
        first_tokens: ``[R]`` int64, where the anchor's row stands in the flat batch.
        num_rows: ``[R]`` int64, rows of each tree, ``0..N``; 0 for padding.
        roots: ``[R]`` int64, position of the anchor, which is the number of context tokens.
        ancestors: ``[R, N, N]`` bool, each row itself included.
        depths: ``[R, N]`` int64.
        scale: of the products.
        sliding_window: a row at position ``p`` sees positions above ``p - sliding_window``; None sees all.
        soft_cap: scores become ``soft_cap * tanh(score / soft_cap)``; None leaves them.
        num_splits: parts of the context that are computed apart and merged, a power of two; None lets a batch that is
            too small for the GPU fill it.

    Raises:
        ValueError: the heads of a cache slot are not contiguous.
    """
    if key_cache.stride(-1) != 1 or value_cache.stride(-1) != 1:
        raise ValueError(f"a head of the cache must be contiguous, but has strides {key_cache.stride()}")
    num_requests, max_rows = depths.shape
    num_heads, head_size = query.shape[1:]
    num_kv_heads, block_size = key_cache.shape[1:3]
    groups = num_heads // num_kv_heads
    padded_head = max(16, triton.next_power_of_2(head_size))
    tile_rows, tile_keys = _tile(query.element_size(), padded_head)
    tile_rows = min(tile_rows, max(16, triton.next_power_of_2(max_rows * groups)))
    num_tiles = triton.cdiv(max_rows * groups, tile_rows)
    if num_splits is None:
        num_splits = _splits_to_fill(query.device, num_tiles * num_kv_heads * num_requests)
    partial = peaks = totals = None
    if num_splits > 1:
        shape = (num_splits, num_requests, max_rows, num_heads)
        partial = query.new_empty(*shape, head_size, dtype=torch.float32)
        peaks, totals = (query.new_empty(shape, dtype=torch.float32) for _ in range(2))
    _tree_attention_kernel[(num_tiles * num_splits, num_kv_heads, num_requests)](
        query,
        key_cache,
        value_cache,
        out,
        partial,
        peaks,
        totals,
        block_table,
        first_tokens,
        num_rows,
        roots,
        ancestors.view(torch.uint8),
        depths,
        scale if soft_cap else scale * _LOG2_E,
        soft_cap or 0.0,
        max_rows,
        num_requests,
        *query.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        *out.stride()[:2],
        block_table.stride(0),
        *ancestors.stride()[:2],
        depths.stride(0),
        NUM_HEADS=num_heads,
        GROUPS=groups,
        HEAD_SIZE=head_size,
        PADDED_HEAD=padded_head,
        BLOCK_SIZE=block_size,
        WINDOW=sliding_window or 0,
        HAS_SOFT_CAP=bool(soft_cap),
        SPLITS=num_splits,
        TILE_ROWS=tile_rows,
        TILE_KEYS=tile_keys,
        num_warps=8 if tile_rows == 128 or padded_head > 128 else 4,
        num_stages=3,
    )
    if num_splits > 1:
        _merge_splits_kernel[(max_rows, num_heads, num_requests)](
            partial,
            peaks,
            totals,
            out,
            first_tokens,
            num_rows,
            max_rows,
            num_requests,
            *out.stride()[:2],
            NUM_HEADS=num_heads,
            HEAD_SIZE=head_size,
            PADDED_HEAD=padded_head,
            SPLITS=num_splits,
            num_warps=1,
        )


def tree_attention_torch(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    out: Tensor,
    block_table: Tensor,
    first_tokens: Tensor,
    num_rows: Tensor,
    roots: Tensor,
    ancestors: Tensor,
    depths: Tensor,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> None:
    """``tree_attention`` in PyTorch."""

    def gathered(cache: Tensor) -> Tensor:  # [R, num_kv_heads, max_blocks * block_size, D]
        return cache[block_table.long()].transpose(1, 2).flatten(2, 3)

    row = torch.arange(depths.shape[1], device=query.device)
    # Rows that a request does not have read some token, and write a line that is cut off.
    tokens = (first_tokens[:, None] + row).where(row < num_rows[:, None], query.shape[0])  # [R, N]
    attended = gathered_tree_attention(
        query[tokens.clamp(max=query.shape[0] - 1)],
        gathered(key_cache),
        gathered(value_cache),
        num_rows,
        roots,
        ancestors,
        depths,
        scale,
        sliding_window,
        soft_cap,
    )
    written = torch.cat([out, out[:1]])
    written[tokens] = attended
    out.copy_(written[:-1])


def gathered_tree_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    num_rows: Tensor,
    roots: Tensor,
    ancestors: Tensor,
    depths: Tensor,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    """The same over keys and values that were taken out of the cache, whatever its layout.

    Args:
        query: ``[R, N, num_heads, D]``.
        keys: ``[R, num_kv_heads, T, D]``, in the order of positions in the request.
        values: as ``keys``.
        num_rows: ``[R]`` int64; what comes out for further rows means nothing.
        roots: ``[R]`` int64.
        ancestors: ``[R, N, N]`` bool, each row itself included.
        depths: ``[R, N]`` int64.
        scale: of the products.
        sliding_window: as in ``tree_attention``.
        soft_cap: as in ``tree_attention``.

    Returns:
        ``[R, N, num_heads, D]`` in the query's dtype.
    """
    num_requests, max_rows, num_heads, _ = query.shape
    num_keys, groups = keys.shape[2], num_heads // keys.shape[1]
    key = torch.arange(num_keys, device=query.device).expand(num_requests, -1)
    row = key - roots[:, None]  # [R, T], the tree row of a key
    in_tree = (row >= 0) & (row < num_rows[:, None])
    row = row.clamp(0, max_rows - 1)
    is_ancestor = ancestors.gather(2, row[:, None].expand(-1, max_rows, -1))  # [R, N, T]
    visible = torch.where(in_tree[:, None], is_ancestor, (key < roots[:, None])[:, None])
    if sliding_window is not None:
        position = torch.where(in_tree, roots[:, None] + depths.gather(1, row), key)
        distance = (roots[:, None] + depths)[..., None] - position[:, None]
        visible = visible & (distance < sliding_window)
    grouped = query.unflatten(2, (-1, groups)).permute(0, 2, 3, 1, 4)  # [R, kv_heads, groups, N, D]
    scores = (grouped @ keys[:, :, None].mT.to(query.dtype)).float() * scale
    if soft_cap:
        scores = soft_cap * (scores / soft_cap).tanh()
    weights = scores.masked_fill(~visible[:, None, None], float("-inf")).softmax(-1)
    # Slots that were never written may hold anything, NaN included, and 0 * NaN is NaN.
    seen = visible.any(1)[:, None, :, None]
    attended = weights.to(query.dtype) @ values.where(seen, 0)[:, :, None].to(query.dtype)
    return attended.permute(0, 3, 1, 2, 4).flatten(2, 3)


def _tile(element_size: int, padded_head: int) -> tuple[int, int]:
    """Query rows and keys of a tile: the largest that spill next to no registers when compiled for sm_80 and sm_90."""
    if element_size > 2:  # without tensor cores
        return 16, 16
    if padded_head <= 128:
        return 128, 64 if padded_head <= 64 else 32
    return 32 if padded_head <= 256 else 16, 32


@functools.cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _splits_to_fill(device: torch.device, num_programs: int) -> int:
    """The power of two of splits, up to 16, with which a launch of ``num_programs`` programs just fits the GPU."""
    splits = 1
    while splits < 16 and 2 * splits * num_programs <= _num_processors(device):
        splits *= 2
    return splits


@triton.jit
def _attend(
    query,  # [TILE_ROWS, PADDED_HEAD]
    key_ptr,
    value_ptr,
    block_table_ptr,  # of the request
    key,  # [TILE_KEYS], place in the request
    stored,  # [TILE_KEYS], whether the slot of a key may be read
    visible,  # [TILE_ROWS, TILE_KEYS]
    weighted,  # [TILE_ROWS, PADDED_HEAD], [TILE_ROWS], [TILE_ROWS]: the state of the online softmax
    peak,
    total,
    scale,
    soft_cap,
    key_stride_block,
    key_stride_slot,
    value_stride_block,
    value_stride_slot,
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
):
    block = tl.load(block_table_ptr + key // BLOCK_SIZE, mask=stored, other=0).to(tl.int64)
    slot = key % BLOCK_SIZE
    channel = tl.arange(0, PADDED_HEAD)
    keys = tl.load(
        key_ptr + channel[:, None] + (block * key_stride_block + slot * key_stride_slot)[None, :],
        mask=(channel < HEAD_SIZE)[:, None] & stored[None, :],
        other=0.0,
    ).to(query.dtype)
    scores = tl.dot(query, keys, input_precision="ieee") * scale
    if HAS_SOFT_CAP:
        # tanh(x) = 2 * sigmoid(2 * x) - 1, which cannot overflow.
        scores = soft_cap * (2 * tl.sigmoid(2 * scores / soft_cap) - 1) * 1.4426950408889634
    scores = tl.where(visible, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    # A row that has seen nothing yet has no peak to subtract.
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(peak - base)
    values = tl.load(
        value_ptr + channel[None, :] + (block * value_stride_block + slot * value_stride_slot)[:, None],
        mask=(channel < HEAD_SIZE)[None, :] & stored[:, None],
        other=0.0,
    ).to(query.dtype)
    weighted = weighted * shrink[:, None] + tl.dot(weights.to(query.dtype), values, input_precision="ieee")
    return weighted, new_peak, total * shrink + tl.sum(weights, 1)


@triton.jit(do_not_specialize=["num_requests"])
def _tree_attention_kernel(
    query_ptr,  # [num_tokens, NUM_HEADS, HEAD_SIZE]
    key_ptr,  # [num_blocks, num_kv_heads, BLOCK_SIZE, HEAD_SIZE]
    value_ptr,  # [num_blocks, num_kv_heads, BLOCK_SIZE, HEAD_SIZE]
    out_ptr,  # [num_tokens, NUM_HEADS, HEAD_SIZE]
    partial_ptr,  # [SPLITS, R, N, NUM_HEADS, HEAD_SIZE], not normalised; None without splits
    peaks_ptr,  # [SPLITS, R, N, NUM_HEADS]
    totals_ptr,  # [SPLITS, R, N, NUM_HEADS]
    block_table_ptr,  # [R, max_blocks]
    first_tokens_ptr,  # [R]
    num_rows_ptr,  # [R]
    roots_ptr,  # [R]
    ancestors_ptr,  # [R, N, N] uint8
    depths_ptr,  # [R, N]
    scale,
    soft_cap,
    max_rows,
    num_requests,
    query_stride_token,
    query_stride_head,
    key_stride_block,
    key_stride_head,
    key_stride_slot,
    value_stride_block,
    value_stride_head,
    value_stride_slot,
    out_stride_token,
    out_stride_head,
    block_table_stride,
    ancestors_stride_request,
    ancestors_stride_row,
    depths_stride,
    NUM_HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
    SPLITS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
):
    tile = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    kv_head = tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)

    num_rows = tl.load(num_rows_ptr + request).to(tl.int32)
    if tile * TILE_ROWS >= num_rows * GROUPS:
        return
    # A tile holds the rows of one KV head: all its query heads of one row, then those of the next row.
    member = tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
    row = member // GROUPS
    head = kv_head * GROUPS + member % GROUPS
    live = row < num_rows
    channel = tl.arange(0, PADDED_HEAD)
    present = live[:, None] & (channel < HEAD_SIZE)[None, :]

    root = tl.load(roots_ptr + request).to(tl.int32)
    token = tl.load(first_tokens_ptr + request) + row
    depth = tl.load(depths_ptr + request * depths_stride + row, mask=live, other=0).to(tl.int32)
    query = tl.load(
        query_ptr + (token * query_stride_token + head * query_stride_head)[:, None] + channel[None, :],
        mask=present,
        other=0.0,
    )
    key_ptr += kv_head.to(tl.int64) * key_stride_head
    value_ptr += kv_head.to(tl.int64) * value_stride_head
    block_table_ptr += request * block_table_stride
    ancestors_ptr += request * ancestors_stride_request

    weighted = tl.zeros([TILE_ROWS, PADDED_HEAD], dtype=tl.float32)
    peak = tl.full([TILE_ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([TILE_ROWS], dtype=tl.float32)

    # No row sees further back than the anchor; blocks before may have been freed.
    oldest = tl.maximum(root - WINDOW + 1, 0) if WINDOW > 0 else 0
    first_tile = oldest // TILE_KEYS
    tiles_per_split = tl.cdiv(tl.cdiv(root, TILE_KEYS) - first_tile, SPLITS)
    begin = (first_tile + split * tiles_per_split) * TILE_KEYS
    end = tl.minimum(begin + tiles_per_split * TILE_KEYS, root)
    for start in range(begin, end, TILE_KEYS):
        key = start + tl.arange(0, TILE_KEYS)
        stored = (key >= oldest) & (key < end)
        visible = live[:, None] & stored[None, :]
        if WINDOW > 0:
            visible = visible & ((root + depth)[:, None] - key[None, :] < WINDOW)
        weighted, peak, total = _attend(
            query,
            key_ptr,
            value_ptr,
            block_table_ptr,
            key,
            stored,
            visible,
            weighted,
            peak,
            total,
            scale,
            soft_cap,
            key_stride_block,
            key_stride_slot,
            value_stride_block,
            value_stride_slot,
            HEAD_SIZE,
            PADDED_HEAD,
            BLOCK_SIZE,
            HAS_SOFT_CAP,
        )
    # The tree belongs to the last split.
    num_nodes = tl.where(split == SPLITS - 1, num_rows, 0)
    for start in range(0, num_nodes, TILE_KEYS):
        node = start + tl.arange(0, TILE_KEYS)
        stored = node < num_rows
        visible = (
            tl.load(
                ancestors_ptr + row[:, None] * ancestors_stride_row + node[None, :],
                mask=live[:, None] & stored[None, :],
                other=0,
            )
            != 0
        )
        if WINDOW > 0:
            node_depth = tl.load(depths_ptr + request * depths_stride + node, mask=stored, other=0).to(tl.int32)
            visible = visible & (depth[:, None] - node_depth[None, :] < WINDOW)
        weighted, peak, total = _attend(
            query,
            key_ptr,
            value_ptr,
            block_table_ptr,
            root + node,
            stored,
            visible,
            weighted,
            peak,
            total,
            scale,
            soft_cap,
            key_stride_block,
            key_stride_slot,
            value_stride_block,
            value_stride_slot,
            HEAD_SIZE,
            PADDED_HEAD,
            BLOCK_SIZE,
            HAS_SOFT_CAP,
        )

    if SPLITS == 1:
        # Every row sees itself; only what pads the tile has a total of 0.
        total = tl.where(live, total, 1.0)
        tl.store(
            out_ptr + (token * out_stride_token + head * out_stride_head)[:, None] + channel[None, :],
            (weighted / total[:, None]).to(out_ptr.dtype.element_ty),
            mask=present,
        )
    else:
        place = ((split * num_requests + request) * max_rows + row) * NUM_HEADS + head
        tl.store(partial_ptr + place[:, None] * HEAD_SIZE + channel[None, :], weighted, mask=present)
        tl.store(peaks_ptr + place, peak, mask=live)
        tl.store(totals_ptr + place, total, mask=live)


@triton.jit(do_not_specialize=["num_requests"])
def _merge_splits_kernel(
    partial_ptr,  # [SPLITS, R, N, NUM_HEADS, HEAD_SIZE]
    peaks_ptr,  # [SPLITS, R, N, NUM_HEADS]
    totals_ptr,  # [SPLITS, R, N, NUM_HEADS]
    out_ptr,  # [num_tokens, NUM_HEADS, HEAD_SIZE]
    first_tokens_ptr,  # [R]
    num_rows_ptr,  # [R]
    max_rows,
    num_requests,
    out_stride_token,
    out_stride_head,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD: tl.constexpr,
    SPLITS: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1)
    request = tl.program_id(2).to(tl.int64)
    if row >= tl.load(num_rows_ptr + request):
        return
    channel = tl.arange(0, PADDED_HEAD)
    present = channel < HEAD_SIZE
    split = tl.arange(0, SPLITS)
    place = ((split * num_requests + request) * max_rows + row) * NUM_HEADS + head
    peaks = tl.load(peaks_ptr + place)
    # The last split holds the row itself, so the highest peak is finite.
    share = tl.exp2(peaks - tl.max(peaks, 0))
    total = tl.sum(tl.load(totals_ptr + place) * share, 0)
    weighted = tl.load(
        partial_ptr + place[:, None] * HEAD_SIZE + channel[None, :], mask=present[None, :], other=0.0
    )  # [SPLITS, PADDED_HEAD]
    attended = tl.sum(weighted * share[:, None], 0) / total
    token = tl.load(first_tokens_ptr + request) + row
    tl.store(
        out_ptr + token * out_stride_token + head * out_stride_head + channel,
        attended.to(out_ptr.dtype.element_ty),
        mask=present,
    )
