"""Penalties and bad words along paths: the kernels, their twins and plain Python on each row's own text agree."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vllm_dartree.kernels.path_logits import (
    forbid_bad_words,
    forbid_bad_words_torch,
    penalise_paths,
    penalise_paths_torch,
)

VOCABULARY, SLOTS, MAX_DEPTH, TEXT = 11, 4, 5, 24
SEEDS = st.integers(0, 2**31)


def random_paths(generator: torch.Generator, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens ``[N, D]`` of paths, depths ``[N]`` and the request slots ``[N]`` of the rows."""
    depths = torch.randint(MAX_DEPTH + 1, (rows,), generator=generator)
    tokens = torch.randint(VOCABULARY, (rows, MAX_DEPTH), generator=generator)
    tokens = tokens.where(torch.arange(MAX_DEPTH) < depths[:, None], -1)
    return tokens, depths, torch.randint(SLOTS, (rows,), generator=generator).int()


def penalised(logits: list[float], text: list[int], repetition: float, frequency: float, presence: float):
    """A row of logits, penalised for all of its output, in float32 as vLLM rounds it."""
    expected = torch.tensor(logits)
    for token in set(text):
        value = expected[token]
        value = value * (1.0 / torch.tensor(repetition) if value > 0 else torch.tensor(repetition))
        expected[token] = value - torch.tensor(frequency) * text.count(token) - torch.tensor(presence)
    return expected


@settings(max_examples=60)
@given(SEEDS, st.integers(1, 6))
def test_penalties_are_those_of_each_rows_own_text(seed, rows):
    generator = torch.Generator().manual_seed(seed)
    paths, depths, slots = random_paths(generator, rows)
    # The third slot has no penalties, and of the others each lacks another one.
    repetition = torch.tensor([1.3, 1.0, 1.0, 0.8])
    frequency = torch.tensor([0.5, 0.7, 0.0, 0.0])
    presence = torch.tensor([0.0, 1.1, 0.0, -0.4])
    texts = torch.randint(VOCABULARY, (SLOTS, 6), generator=generator).tolist()
    counts = torch.stack([torch.bincount(torch.tensor(text), minlength=VOCABULARY) for text in texts]).int()
    raw = torch.randn(rows, VOCABULARY, generator=generator)
    base, expected = raw.clone(), raw.clone()
    for row in range(rows):
        slot = int(slots[row])
        penalties = repetition[slot].item(), frequency[slot].item(), presence[slot].item()
        base[row] = penalised(raw[row].tolist(), texts[slot], *penalties)
        path = paths[row, : depths[row]].tolist()
        expected[row] = penalised(raw[row].tolist(), texts[slot] + path, *penalties)
    for penalise in (penalise_paths, penalise_paths_torch):
        logits = base.clone()
        unpenalised = raw.gather(1, paths.clamp(min=0))
        penalise(logits, unpenalised, paths, slots, repetition, frequency, presence, counts)
        torch.testing.assert_close(logits, expected, rtol=0, atol=0)


def test_a_token_that_cannot_be_sampled_stays_so():
    paths, slots = torch.tensor([[3, 3, -1]]), torch.zeros(1, dtype=torch.int32)
    one = torch.ones(1)
    for penalise in (penalise_paths, penalise_paths_torch):
        logits = torch.full((1, VOCABULARY), float("-inf"))
        counts = torch.zeros(1, VOCABULARY, dtype=torch.int32)
        penalise(logits, logits[:, :3].clone(), paths, slots, one * 1.2, one, one, counts)
        assert (logits == float("-inf")).all()


@st.composite
def requests_with_bad_words(draw):
    """By slot the prompt's length, the text and the bad words, over few tokens so that words occur."""
    token = st.integers(0, 2)
    words = st.lists(st.lists(token, min_size=1, max_size=4), max_size=3)
    requests = []
    for _ in range(SLOTS):
        text = draw(st.lists(token, min_size=1, max_size=TEXT - 1))
        requests.append((draw(st.integers(1, len(text))), text, draw(words)))
    paths = draw(st.lists(st.lists(token, max_size=MAX_DEPTH), min_size=1, max_size=5))
    return requests, paths, [draw(st.integers(0, SLOTS - 1)) for _ in paths]


def ends_with(text: list[int], beginning: list[int]) -> bool:
    return not beginning or text[-len(beginning) :] == beginning


@pytest.mark.parametrize("forbid", [forbid_bad_words, forbid_bad_words_torch])
@settings(max_examples=80)
@given(requests_with_bad_words())
def test_bad_words_are_looked_for_in_each_rows_own_output(forbid, case):
    requests, paths, slots = case
    words = torch.full((SLOTS, 16), 99, dtype=torch.int32)
    offsets = torch.full((SLOTS, 5), 77, dtype=torch.int32)
    texts = torch.full((SLOTS, TEXT), 1, dtype=torch.int32)
    for slot, (_, text, bad) in enumerate(requests):
        flat = [token for word in bad for token in word]
        words[slot, : len(flat)] = torch.tensor(flat, dtype=torch.int32)
        ends = [0, *torch.tensor([len(word) for word in bad], dtype=torch.int64).cumsum(0).tolist()]
        offsets[slot, : len(ends)] = torch.tensor(ends, dtype=torch.int32)
        texts[slot, : len(text)] = torch.tensor(text, dtype=torch.int32)
    expected = torch.zeros(len(paths), VOCABULARY)
    for row, (path, slot) in enumerate(zip(paths, slots, strict=True)):
        prompt_len, text, bad = requests[slot]
        for word in bad:
            if ends_with(text[prompt_len:] + path, word[:-1]):
                expected[row, word[-1]] = float("-inf")
    most = max(len(requests[slot][2]) for slot in slots)
    if not most:
        return
    logits = torch.zeros(len(paths), VOCABULARY)
    forbid(
        logits,
        torch.tensor([path + [-1] * (MAX_DEPTH - len(path)) for path in paths]),
        torch.tensor([len(path) for path in paths]),
        torch.tensor(slots, dtype=torch.int32),
        words,
        offsets,
        torch.tensor([len(bad) for _, _, bad in requests], dtype=torch.int32),
        texts,
        torch.tensor([prompt_len for prompt_len, _, _ in requests], dtype=torch.int32),
        torch.tensor([len(text) for _, text, _ in requests], dtype=torch.int32),
        most,
        max(len(word) for slot in slots for word in requests[slot][2]),
    )
    assert torch.equal(logits, expected)


def test_a_word_longer_than_a_tile_of_the_kernel():
    word = list(range(1, 10)) * 4
    logits = torch.zeros(2, VOCABULARY)
    forbid_bad_words(
        logits,
        torch.tensor([[word[-3], word[-2]], [word[-3], -1]]),
        torch.tensor([2, 1]),
        torch.zeros(2, dtype=torch.int32),
        torch.tensor([word], dtype=torch.int32),
        torch.tensor([[0, len(word)]], dtype=torch.int32),
        torch.ones(1, dtype=torch.int32),
        torch.tensor([[7, *word[:-3]]], dtype=torch.int32),
        torch.ones(1, dtype=torch.int32),
        torch.tensor([len(word) - 2], dtype=torch.int32),
        1,
        len(word),
    )
    expected = torch.zeros(2, VOCABULARY)
    expected[0, word[-1]] = float("-inf")
    assert torch.equal(logits, expected)
