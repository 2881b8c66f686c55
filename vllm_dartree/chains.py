"""Which requests are drafted as a chain, and why: one truth for the runner, the metrics and ``check``."""

from collections.abc import Callable, Mapping
from typing import Any

CUSTOM_PROCESSORS = "custom logits processors"
NEUTRAL_PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
# What makes the logits of a row depend on the tokens before it, which vLLM takes to be those of the rows before. That
# is so on a chain; on a tree a request would be sampled as if the siblings of its tokens stood in its text.
PATH_DEPENDENT: dict[str, Callable[[Any], bool]] = {
    "penalties": lambda params: any(getattr(params, key) != value for key, value in NEUTRAL_PENALTIES.items()),
    "bad words": lambda params: bool(params.bad_words),
    "thinking budget": lambda params: params.thinking_token_budget is not None,
    "structured output": lambda params: params.structured_outputs is not None,
}
REASONS = (*PATH_DEPENDENT, CUSTOM_PROCESSORS)


def chain_reasons(params: Any | None, has_custom_processors: bool = False) -> list[str]:
    """Why a request is drafted as a chain; empty for one that is drafted as a tree.

    Args:
        params: vLLM's ``SamplingParams``; None for a pooling request.
        has_custom_processors: whether the engine runs logits processors that are not vLLM's own.
    """
    if params is None:
        return []
    reasons = [reason for reason, applies in PATH_DEPENDENT.items() if applies(params)]
    return reasons + [CUSTOM_PROCESSORS] * has_custom_processors


def default_penalties(defaults: Mapping[str, Any]) -> dict[str, float]:
    """The penalties among a model's default sampling parameters, which make a chain of every request that keeps them.

    Args:
        defaults: ``ModelConfig.get_diff_sampling_param()``, what ``generation_config.json`` and the like say.
    """
    return {key: defaults[key] for key, value in NEUTRAL_PENALTIES.items() if defaults.get(key, value) != value}
