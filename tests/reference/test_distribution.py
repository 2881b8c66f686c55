"""At T=1 the output has exactly the target's distribution (chi-square), and the test would notice if it had not."""

import itertools

import pytest
import torch
from reference.conftest import TINY_VOCAB

from vllm_dartree.reference import decoder as decoder_module
from vllm_dartree.reference.decoder import ReferenceDecoder
from vllm_dartree.tree import TreeConfig, walk

PROMPT, LENGTH, SAMPLES = [1, 3, 0, 2], 3, 4000
CONFIG = TreeConfig(budget=8, width=3, candidates=4)


def _exact(target) -> dict[tuple[int, ...], float]:
    """Probability of every continuation of ``LENGTH`` tokens."""
    continuations = list(itertools.product(range(TINY_VOCAB), repeat=LENGTH))
    with torch.inference_mode():
        tokens = torch.tensor([PROMPT + list(continuation) for continuation in continuations])
        log_probs = target.model(tokens).logits.double().log_softmax(-1)
    steps = torch.arange(len(PROMPT) - 1, len(PROMPT) + LENGTH - 1)
    joint = log_probs[:, steps].gather(-1, tokens[:, len(PROMPT) :, None]).sum(dim=(1, 2)).exp()
    return dict(zip(continuations, joint.tolist(), strict=True))


def _chi_square(pair, system: str) -> tuple[float, float]:
    """The statistic and its 99.9% quantile, over cells of at least five expected samples; the rest are one cell."""
    target, drafter = pair
    counts: dict[tuple[int, ...], int] = {}
    for seed in range(SAMPLES):
        decoder = ReferenceDecoder(target, drafter, system, CONFIG, temperature=1.0, seed=seed)
        continuation = tuple(decoder.generate(PROMPT, LENGTH).tokens)
        counts[continuation] = counts.get(continuation, 0) + 1
    statistic, cells, rare_expected, rare_seen = 0.0, 0, 0.0, 0
    for continuation, probability in _exact(target).items():
        expected, seen = probability * SAMPLES, counts.get(continuation, 0)
        if expected < 5:
            rare_expected, rare_seen = rare_expected + expected, rare_seen + seen
            continue
        statistic, cells = statistic + (seen - expected) ** 2 / expected, cells + 1
    if rare_expected >= 5:
        statistic, cells = statistic + (rare_seen - rare_expected) ** 2 / rare_expected, cells + 1
    freedom = cells - 1
    # Wilson-Hilferty: a chi-square's cube root is nearly normal; 3.09 is the normal's 99.9% quantile.
    quantile = freedom * (1 - 2 / (9 * freedom) + 3.09 * (2 / (9 * freedom)) ** 0.5) ** 3
    return statistic, quantile


@pytest.mark.slow
@pytest.mark.parametrize("system", ["dartree", "domino", "ddtree"])
def test_samples_have_the_targets_distribution(tiny_vocab_pair, system):
    statistic, quantile = _chi_square(tiny_vocab_pair, system)
    assert statistic < quantile


@pytest.mark.slow
def test_a_biased_acceptance_rule_fails_the_same_test(tiny_vocab_pair, monkeypatch):
    def accept_the_first_sibling_for_the_second(tokens, parents, tree, target_tokens, max_depth):
        siblings = [row for row in range(1, parents.shape[1]) if parents[0, row] == 0]
        if len(siblings) > 1 and target_tokens[0, 0] == tokens[0, siblings[1] - 1]:
            target_tokens = target_tokens.clone()
            target_tokens[0, 0] = tokens[0, siblings[0] - 1]
        return walk(tokens, parents, tree, target_tokens, max_depth)

    monkeypatch.setattr(decoder_module, "walk", accept_the_first_sibling_for_the_second)
    statistic, quantile = _chi_square(tiny_vocab_pair, "dartree")
    assert statistic > 2 * quantile
