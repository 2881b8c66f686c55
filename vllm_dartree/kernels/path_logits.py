"""Logits processing that depends on the text before a row, where rows are the nodes of trees.

vLLM's own kernels take the drafts before a row to be the rows before it. Here every row comes with its *path*: the
tokens drafted between the anchor and itself, ``[N, D]`` by depth, -1 past its end.
"""

# ruff: noqa: N803 - Triton's compile-time arguments are written in capitals.

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE_TOKENS = 16


def penalise_paths(
    logits: Tensor,
    unpenalised: Tensor,
    paths: Tensor,
    slots: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
    counts: Tensor,
) -> None:
    """Penalises the tokens on each row's path, in place; all others are penalised already for the text before them.

    As in vLLM's ``apply_penalties``: positive logits are divided by the repetition penalty and others multiplied with
    it, then the frequency penalty is taken off once for every occurrence in the output and the presence penalty once.

    Args:
        logits: ``[N, V]`` float32, changed in place.
        unpenalised: ``[N, D]`` float32, what the logits of the path's tokens were before any penalty.
        paths: ``[N, D]`` int64.
        slots: ``[N]``, the request slot of each row.
        repetition: ``[S]`` float32 by slot, as are the next two; the neutral values are 1, 0 and 0.
        frequency: ``[S]`` float32.
        presence: ``[S]`` float32.
        counts: ``[S, V]`` int32, occurrences in the output up to the anchor.
    """
    num_rows, max_depth = paths.shape
    _penalise_paths_kernel[(num_rows,)](
        logits,
        unpenalised,
        paths,
        slots,
        repetition,
        frequency,
        presence,
        counts,
        max_depth,
        logits.stride(0),
        counts.stride(0),
        PADDED_DEPTH=triton.next_power_of_2(max_depth),
    )


def penalise_paths_torch(
    logits: Tensor,
    unpenalised: Tensor,
    paths: Tensor,
    slots: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
    counts: Tensor,
) -> None:
    """``penalise_paths`` in PyTorch."""
    slots, drafted, tokens = slots.long(), paths >= 0, paths.clamp(min=0)
    repetition, frequency, presence = (values[slots, None] for values in (repetition, frequency, presence))
    in_path = ((tokens[:, :, None] == tokens[:, None]) & drafted[:, None]).sum(-1)
    occurrences = counts[slots[:, None], tokens] + in_path
    values = unpenalised * (1.0 / repetition).where(unpenalised > 0, repetition)
    values = values - frequency * occurrences - presence
    # Lanes past the end write, where the first of the path writes, the same; a row without a path keeps what it has.
    values = values.where(drafted, values[:, :1]).where(drafted[:, :1], logits.gather(1, tokens))
    logits.scatter_(1, tokens.where(drafted, tokens[:, :1]), values)


def forbid_bad_words(
    logits: Tensor,
    paths: Tensor,
    depths: Tensor,
    slots: Tensor,
    words: Tensor,
    offsets: Tensor,
    num_words: Tensor,
    texts: Tensor,
    prompt_len: Tensor,
    total_len: Tensor,
    max_num_words: int,
    longest: int,
) -> None:
    """Sets the logit of a bad word's last token to -inf in each row before which the word's other tokens stand.

    As in vLLM's ``apply_bad_words``, words are looked for in the output alone.

    Args:
        logits: ``[N, V]`` float32, changed in place.
        paths: ``[N, D]`` int64.
        depths: ``[N]`` int64, number of tokens on each path.
        slots: ``[N]``, the request slot of each row.
        words: ``[S, T]`` int32 by slot, the tokens of all words after one another.
        offsets: ``[S, M + 1]`` int32, where each word starts, and the end.
        num_words: ``[S]`` int32.
        texts: ``[S, max_len]`` int32, prompt and output up to the anchor.
        prompt_len: ``[S]`` int32.
        total_len: ``[S]`` int32.
        max_num_words: of the requests in the batch.
        longest: tokens of their longest word.
    """
    _forbid_bad_words_kernel[(paths.shape[0], max_num_words)](
        logits,
        paths,
        depths,
        slots,
        words,
        offsets,
        num_words,
        texts,
        prompt_len,
        total_len,
        paths.shape[1],
        longest,
        logits.stride(0),
        words.stride(0),
        offsets.stride(0),
        texts.stride(0),
        TILE_TOKENS=_TILE_TOKENS,
    )


def forbid_bad_words_torch(
    logits: Tensor,
    paths: Tensor,
    depths: Tensor,
    slots: Tensor,
    words: Tensor,
    offsets: Tensor,
    num_words: Tensor,
    texts: Tensor,
    prompt_len: Tensor,
    total_len: Tensor,
    max_num_words: int,
    longest: int,
) -> None:
    """``forbid_bad_words`` in PyTorch."""
    slots = slots.long()
    word = torch.arange(max_num_words, device=logits.device)
    starts, ends = offsets[slots, :max_num_words].long(), offsets[slots, 1 : max_num_words + 1].long()
    exists = word < num_words[slots, None]  # [N, M]
    starts, ends = starts.where(exists, 0), ends.where(exists, 1)
    lengths = ends - starts - 1
    output_len = (total_len[slots] - prompt_len[slots] + depths)[:, None]
    matches = exists & (lengths <= output_len)
    # Tokens of the words by their distance from the end of the text.
    back = torch.arange(1, longest, device=logits.device)
    compared = back <= lengths[..., None]  # [N, M, longest - 1]
    wanted = words[slots[:, None, None], (ends[..., None] - 1 - back).clamp(min=0)]
    on_path = depths[:, None] - back  # [N, longest - 1], index in the path, negative in the text
    drafted = paths.gather(1, on_path.clamp(min=0, max=paths.shape[1] - 1))
    in_text = (total_len[slots, None] + on_path).clamp(min=0, max=texts.shape[1] - 1)
    said = drafted.where(on_path >= 0, texts[slots[:, None], in_text])
    matches &= ((wanted == said[:, None]) | ~compared).all(-1)
    last = words[slots[:, None], ends - 1].long().where(exists, 0)
    # Words may share their last token, so what is written for it must not depend on the order.
    written = torch.full_like(matches, float("inf"), dtype=logits.dtype).masked_fill(matches, float("-inf"))
    logits.scatter_reduce_(1, last, written, "amin")


@triton.jit
def _penalise_paths_kernel(
    logits_ptr,  # [N, V]
    unpenalised_ptr,  # [N, D]
    paths_ptr,  # [N, D]
    slots_ptr,  # [N]
    repetition_ptr,  # [S]
    frequency_ptr,  # [S]
    presence_ptr,  # [S]
    counts_ptr,  # [S, V]
    max_depth,
    logits_stride,
    counts_stride,
    PADDED_DEPTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    repetition = tl.load(repetition_ptr + slot)
    frequency = tl.load(frequency_ptr + slot)
    presence = tl.load(presence_ptr + slot)
    if (repetition != 1.0) | (frequency != 0.0) | (presence != 0.0):
        depth = tl.arange(0, PADDED_DEPTH)
        token = tl.load(paths_ptr + row * max_depth + depth, mask=depth < max_depth, other=-1)
        drafted = token >= 0
        value = tl.load(unpenalised_ptr + row * max_depth + depth, mask=drafted, other=0.0)
        same = (token[:, None] == token[None, :]) & drafted[None, :]
        occurrences = tl.load(counts_ptr + slot * counts_stride + token, mask=drafted, other=0)
        occurrences += tl.sum(same.to(tl.int32), 1)
        value *= tl.where(value > 0, 1.0 / repetition, repetition)
        value -= frequency * occurrences
        value -= presence
        # A token that is on the path twice gets the same value twice.
        tl.store(logits_ptr + row * logits_stride + token, value, mask=drafted)


@triton.jit
def _forbid_bad_words_kernel(
    logits_ptr,  # [N, V]
    paths_ptr,  # [N, D]
    depths_ptr,  # [N]
    slots_ptr,  # [N]
    words_ptr,  # [S, T]
    offsets_ptr,  # [S, M + 1]
    num_words_ptr,  # [S]
    texts_ptr,  # [S, max_len]
    prompt_len_ptr,  # [S]
    total_len_ptr,  # [S]
    max_depth,
    longest,
    logits_stride,
    words_stride,
    offsets_stride,
    texts_stride,
    TILE_TOKENS: tl.constexpr,
):
    row, word = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if word < tl.load(num_words_ptr + slot):
        start = tl.load(offsets_ptr + slot * offsets_stride + word)
        last = tl.load(offsets_ptr + slot * offsets_stride + word + 1) - 1
        words_ptr += slot * words_stride
        length = last - start
        depth = tl.load(depths_ptr + row)
        total_len = tl.load(total_len_ptr + slot)
        if length <= total_len - tl.load(prompt_len_ptr + slot) + depth:
            differences = 0
            for first in range(0, longest, TILE_TOKENS):
                index = first + tl.arange(0, TILE_TOKENS)
                inside = index < length
                wanted = tl.load(words_ptr + start + index, mask=inside, other=0)
                on_path = depth - length + index  # index in the path, negative in the text
                drafted = tl.load(paths_ptr + row * max_depth + on_path, mask=inside & (on_path >= 0), other=0)
                said = tl.load(
                    texts_ptr + slot * texts_stride + total_len + on_path, mask=inside & (on_path < 0), other=0
                )
                differs = inside & (wanted != tl.where(on_path >= 0, drafted, said.to(tl.int64)))
                differences += tl.sum(differs.to(tl.int32), 0)
            if differences == 0:
                token = tl.load(words_ptr + last)
                tl.store(logits_ptr + row * logits_stride + token, float("-inf"))
