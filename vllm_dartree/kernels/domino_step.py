"""One depth of the expansion with a Domino head, between its two matrix products.

A branch's state is one row ``[state | Ws state | gates]`` of ``G + E + 3G`` numbers: what the GRU holds, what scores
candidates, and what the next GRU step adds to its input. The products that make the last two, and the input of the GRU,
read all of the head's weights for a handful of rows, which is cuBLAS's business; all else of a depth is two launches.
"""

# ruff: noqa: N803 - Triton's compile-time arguments are written in capitals.

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

_TILE_EMB = 64
_TILE_STATE = 1024


def best_children(
    hidden: Tensor,
    projected: Tensor,
    output_weight: Tensor,
    candidates: Tensor,
    base: Tensor,
    scores: Tensor,
    width: int,
    corrected: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The ``width`` best children of ``F`` live branches, out of ``K`` candidates each.

    Best by the log-probability of the path, normalised over the candidates; ties go to the branch and then to the
    candidate that comes first; what has no number ranks as impossible.

    Args:
        hidden: ``[R, E]``, ``Wz z`` of the slot.
        projected: ``[R, F, E]``, ``Ws state`` of the branches.
        output_weight: ``[V, E]``, ``W2``.
        candidates: ``[R, K]`` int64.
        base: ``[R, K]`` float32, base logits.
        scores: ``[R, F]`` float32, log-probabilities of the branches.
        width: at most ``F * K``.
        corrected: whether the head has a say in this slot.

    Returns:
        Of the children, best first, ``[R, width]`` each: score, branch of the parent, index among candidates, token.
    """
    num_requests, num_branches, emb_dim = projected.shape
    num_candidates = candidates.shape[1]
    best = scores.new_empty(num_requests, width)
    branch, choice, tokens = (candidates.new_empty(num_requests, width) for _ in range(3))
    _best_children_kernel[(num_requests,)](
        hidden,
        projected,
        output_weight,
        candidates,
        base,
        scores,
        best,
        branch,
        choice,
        tokens,
        hidden.stride(0),
        *projected.stride()[:2],
        output_weight.stride(0),
        candidates.stride(0),
        base.stride(0),
        scores.stride(0),
        WIDTH=width,
        BRANCHES=num_branches,
        PADDED_BRANCHES=max(16, triton.next_power_of_2(num_branches)),
        CANDIDATES=num_candidates,
        PADDED_CANDIDATES=max(16, triton.next_power_of_2(num_candidates)),
        EMB=emb_dim if corrected else 0,
        TILE_EMB=_TILE_EMB,
    )
    return best, branch, choice, tokens


def best_children_torch(
    hidden: Tensor,
    projected: Tensor,
    output_weight: Tensor,
    candidates: Tensor,
    base: Tensor,
    scores: Tensor,
    width: int,
    corrected: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``best_children`` in PyTorch."""
    logits = base[:, None].expand(-1, scores.shape[1], -1)
    if corrected:
        activated = F.silu(hidden[:, None].float() + projected.float())
        logits = logits + activated @ output_weight[candidates].mT.float()
    log_probs = logits.log_softmax(-1).clamp(max=0).nan_to_num(float("-inf"), neginf=float("-inf"))
    best, place = (scores[..., None] + log_probs).flatten(1).sort(descending=True, stable=True)
    place = place[:, :width]
    choice = place % candidates.shape[1]
    return best[:, :width], place // candidates.shape[1], choice, candidates.gather(1, choice)


def gru_step(inputs: Tensor, states: Tensor, branch: Tensor, out: Tensor) -> None:
    """Writes the GRU's states after one more token, ``torch.gru_cell`` with both of its products given.

    Args:
        inputs: ``[R, W, 3G]``, the input weights' product with the tokens' embeddings, biases included.
        states: ``[R, F, >= 4G]``: first the state, last its product with the state weights, biases included.
        branch: ``[R, W]`` int64, among ``F``: where each token was appended.
        out: ``[R, W, G]``, any strides but the last.
    """
    num_requests, width, size = out.shape
    _gru_step_kernel[(num_requests * width, triton.cdiv(size, _TILE_STATE))](
        inputs,
        states,
        branch,
        out,
        states.shape[-1] - 3 * size,
        width,
        *inputs.stride()[:2],
        *states.stride()[:2],
        *branch.stride(),
        *out.stride()[:2],
        SIZE=size,
        TILE=min(_TILE_STATE, triton.next_power_of_2(size)),
    )


def gru_step_torch(inputs: Tensor, states: Tensor, branch: Tensor, out: Tensor) -> None:
    """``gru_step`` in PyTorch."""
    size = out.shape[-1]
    parents = states.gather(1, branch[..., None].expand(-1, -1, states.shape[-1]))
    state, gates = parents[..., :size], parents[..., -3 * size :]
    reset, update = (inputs[..., : 2 * size] + gates[..., : 2 * size]).sigmoid().chunk(2, -1)
    fresh = torch.addcmul(inputs[..., 2 * size :], reset, gates[..., 2 * size :]).tanh()
    torch.lerp(fresh, state, update, out=out)


@triton.jit
def _best_children_kernel(
    hidden_ptr,  # [R, EMB]
    projected_ptr,  # [R, BRANCHES, EMB]
    weight_ptr,  # [V, EMB]
    candidates_ptr,  # [R, CANDIDATES]
    base_ptr,  # [R, CANDIDATES]
    scores_ptr,  # [R, BRANCHES]
    best_ptr,  # [R, WIDTH]
    branch_ptr,  # [R, WIDTH]
    choice_ptr,  # [R, WIDTH]
    tokens_ptr,  # [R, WIDTH]
    hidden_stride,
    projected_stride_request,
    projected_stride_branch,
    weight_stride,
    candidates_stride,
    base_stride,
    scores_stride,
    WIDTH: tl.constexpr,
    BRANCHES: tl.constexpr,
    PADDED_BRANCHES: tl.constexpr,
    CANDIDATES: tl.constexpr,
    PADDED_CANDIDATES: tl.constexpr,
    EMB: tl.constexpr,
    TILE_EMB: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    candidates_ptr += request * candidates_stride
    branch = tl.arange(0, PADDED_BRANCHES)
    candidate = tl.arange(0, PADDED_CANDIDATES)
    live = branch < BRANCHES
    present = candidate < CANDIDATES
    token = tl.load(candidates_ptr + candidate, mask=present, other=0)
    base = tl.load(base_ptr + request * base_stride + candidate, mask=present, other=float("-inf"))
    logits = tl.zeros([PADDED_BRANCHES, PADDED_CANDIDATES], dtype=tl.float32)
    for start in range(0, EMB, TILE_EMB):
        channel = start + tl.arange(0, TILE_EMB)
        inside = channel < EMB
        hidden = tl.load(hidden_ptr + request * hidden_stride + channel, mask=inside, other=0.0).to(tl.float32)
        projected = tl.load(
            projected_ptr
            + request * projected_stride_request
            + branch[:, None] * projected_stride_branch
            + channel[None, :],
            mask=live[:, None] & inside[None, :],
            other=0.0,
        ).to(tl.float32)
        weight = tl.load(
            weight_ptr + channel[:, None] + (token * weight_stride)[None, :],
            mask=inside[:, None] & present[None, :],
            other=0.0,
        )
        summed = hidden[None, :] + projected
        activated = summed * tl.sigmoid(summed)
        logits += tl.dot(activated.to(weight.dtype), weight, input_precision="ieee")
    logits += base[None, :]
    shifted = logits - tl.max(logits, 1)[:, None]
    log_total = tl.log(tl.sum(tl.exp(shifted), 1))[:, None]
    # Only a number equals itself. Asked before minimum(), which may prefer 0 to NaN.
    is_number = (shifted == shifted) & (log_total == log_total)
    log_probs = tl.where(is_number, tl.minimum(shifted - log_total, 0.0), float("-inf"))
    scores = tl.load(scores_ptr + request * scores_stride + branch, mask=live, other=0.0)
    # Adding 0 makes one zero of two, which differ in their bits.
    paths = scores[:, None] + log_probs + 0.0
    # Bits of a float in the order of integers; below them the place, lowest first, so that no two keys are equal.
    bits = paths.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    place = branch[:, None] * CANDIDATES + candidate[None, :]
    keys = (ordered.to(tl.int64) << 32) | (0x7FFFFFFF - place).to(tl.int64)
    taken = -(2**63)
    keys = tl.where(live[:, None] & present[None, :], keys, taken)
    for rank in range(WIDTH):
        key = tl.max(tl.max(keys, 1), 0)
        keys = tl.where(keys == key, taken, keys)
        place_of_best = 0x7FFFFFFF - (key & 0x7FFFFFFF)
        choice = place_of_best % CANDIDATES
        bits_of_best = (key >> 32).to(tl.int32)
        bits_of_best = bits_of_best ^ ((bits_of_best >> 31) & 0x7FFFFFFF)
        out = request * WIDTH + rank
        tl.store(best_ptr + out, bits_of_best.to(tl.float32, bitcast=True))
        tl.store(branch_ptr + out, place_of_best // CANDIDATES)
        tl.store(choice_ptr + out, choice)
        tl.store(tokens_ptr + out, tl.load(candidates_ptr + choice))


@triton.jit
def _gru_step_kernel(
    inputs_ptr,  # [R, W, 3 * SIZE]
    states_ptr,  # [R, F, gates_at + 3 * SIZE]
    branch_ptr,  # [R, W]
    out_ptr,  # [R, W, SIZE]
    gates_at,
    width,
    inputs_stride_request,
    inputs_stride_row,
    states_stride_request,
    states_stride_branch,
    branch_stride_request,
    branch_stride_row,
    out_stride_request,
    out_stride_row,
    SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    request = (tl.program_id(0) // width).to(tl.int64)
    row = tl.program_id(0) % width
    unit = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = unit < SIZE
    branch = tl.load(branch_ptr + request * branch_stride_request + row * branch_stride_row)
    inputs_ptr += request * inputs_stride_request + row * inputs_stride_row
    states_ptr += request * states_stride_request + branch * states_stride_branch
    gates_ptr = states_ptr + gates_at
    state = tl.load(states_ptr + unit, mask=inside, other=0.0).to(tl.float32)
    reset = tl.sigmoid(
        tl.load(inputs_ptr + unit, mask=inside, other=0.0).to(tl.float32)
        + tl.load(gates_ptr + unit, mask=inside, other=0.0).to(tl.float32)
    )
    update = tl.sigmoid(
        tl.load(inputs_ptr + SIZE + unit, mask=inside, other=0.0).to(tl.float32)
        + tl.load(gates_ptr + SIZE + unit, mask=inside, other=0.0).to(tl.float32)
    )
    summed = (
        tl.load(inputs_ptr + 2 * SIZE + unit, mask=inside, other=0.0).to(tl.float32)
        + tl.load(gates_ptr + 2 * SIZE + unit, mask=inside, other=0.0).to(tl.float32) * reset
    )
    fresh = 2 * tl.sigmoid(2 * summed) - 1  # tanh
    tl.store(
        out_ptr + request * out_stride_request + row * out_stride_row + unit,
        (fresh + update * (state - fresh)).to(out_ptr.dtype.element_ty),
        mask=inside,
    )
