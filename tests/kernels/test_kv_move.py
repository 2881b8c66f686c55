"""Moving cache slots: the kernel, its twin and a loop in plain Python agree."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from vllm_dartree.kernels.kv_move import move_slots, move_slots_torch

BLOCK_SIZE, NUM_BLOCKS = 16, 9


def numbered_cache(content: int = 48, kv_heads: int = 2, slots_inside_heads: bool = True) -> Tensor:
    """``[num_blocks, kv_heads, block_size, content]``, every element another number."""
    shape = (NUM_BLOCKS, kv_heads, BLOCK_SIZE, content)
    if not slots_inside_heads:
        shape = (NUM_BLOCKS, BLOCK_SIZE, kv_heads, content)
    cache = torch.arange(NUM_BLOCKS * kv_heads * BLOCK_SIZE * content, dtype=torch.float32).view(shape)
    return cache if slots_inside_heads else cache.transpose(1, 2)


def moved_one_by_one(cache: Tensor, source: Tensor, destination: Tensor) -> Tensor:
    moved = cache.clone()
    for old, new in zip(source.flatten().tolist(), destination.flatten().tolist(), strict=True):
        if old >= 0 and new >= 0:
            moved[new // BLOCK_SIZE, :, new % BLOCK_SIZE] = cache[old // BLOCK_SIZE, :, old % BLOCK_SIZE]
    return moved


@st.composite
def moves(draw) -> tuple[Tensor, Tensor]:
    """Sources and destinations ``[G, P]`` that overlap within a group, each group on slots of its own."""
    groups, path = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    # Block 0 is the null block, to which nothing is moved.
    slots = draw(st.permutations(range(BLOCK_SIZE, NUM_BLOCKS * BLOCK_SIZE)))
    own = torch.tensor(slots[: groups * 12]).view(groups, 12)
    order = torch.tensor([draw(st.permutations(range(12))) for _ in range(groups)])
    source, destination = own[:, :path], own.gather(1, order)[:, :path]
    if draw(st.booleans()):
        skipped = torch.tensor(draw(st.lists(st.booleans(), min_size=path, max_size=path)))
        source = source.where(~skipped, -1)
    return source, destination


@pytest.mark.parametrize("move", [move_slots, move_slots_torch])
@given(moves=moves(), content=st.sampled_from([64, 160]), slots_inside_heads=st.booleans())
def test_all_slots_are_read_before_one_is_written(move, moves, content, slots_inside_heads):
    cache = numbered_cache(content, slots_inside_heads=slots_inside_heads)
    expected = moved_one_by_one(cache, *moves)
    move([cache], *moves)
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("move", [move_slots, move_slots_torch])
def test_a_flat_list_is_one_group(move):
    cache = numbered_cache()
    slots = torch.arange(20, 60)
    expected = moved_one_by_one(cache, slots, slots.roll(7))
    move([cache], slots, slots.roll(7))
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_content_is_copied_to_the_bit(dtype):
    cache = numbered_cache().to(dtype)
    cache[2, :, 3] = float("nan")
    source, destination = torch.tensor([[35, 36, 37]]), torch.tensor([[34, 35, 36]])
    expected = moved_one_by_one(cache, source, destination)
    move_slots([cache], source, destination)
    assert torch.equal(cache.view(torch.uint8), expected.view(torch.uint8))


def test_a_path_longer_than_a_tile_is_moved():
    cache = numbered_cache(content=160)
    source = torch.arange(BLOCK_SIZE, NUM_BLOCKS * BLOCK_SIZE)
    expected = moved_one_by_one(cache, source, source.flip(0))
    move_slots([cache], source, source.flip(0))
    assert torch.equal(cache, expected)


@pytest.mark.parametrize("move", [move_slots, move_slots_torch])
@given(moves=moves())
def test_all_layers_of_a_group_move_at_once(move, moves):
    caches = [numbered_cache() + 1e5 * layer for layer in range(3)]
    expected = [moved_one_by_one(cache, *moves) for cache in caches]
    move(caches, *moves)
    assert all(torch.equal(*pair) for pair in zip(caches, expected, strict=True))


def test_a_cache_with_scattered_heads_is_refused():
    cache = numbered_cache().transpose(2, 3)
    with pytest.raises(ValueError, match="contiguous"):
        move_slots([cache], torch.tensor([20]), torch.tensor([21]))


def test_caches_that_differ_are_refused():
    caches = [numbered_cache(), numbered_cache(slots_inside_heads=False)]
    with pytest.raises(ValueError, match="must be alike"):
        move_slots(caches, torch.tensor([20]), torch.tensor([21]))
