"""Which requests are drafted as a chain, and why: one truth for the runner, the metrics and ``check``.

What they need makes the logits of a row depend on the tokens before it, where those are taken to be the rows before: by
a grammar in vLLM's scheduler, which knows of no tree, and by the logits processors of others. vLLM's own are computed
along the paths of a tree (``engine.path_processors``).
"""

from typing import Any

STRUCTURED_OUTPUT, CUSTOM_PROCESSORS = "structured output", "custom logits processors"
REASONS = (STRUCTURED_OUTPUT, CUSTOM_PROCESSORS)


def chain_reasons(params: Any | None, has_custom_processors: bool = False) -> list[str]:
    """Why a request is drafted as a chain; empty for one that is drafted as a tree.

    Args:
        params: vLLM's ``SamplingParams``; None for a pooling request.
        has_custom_processors: whether the engine runs logits processors that are not vLLM's own.
    """
    if params is None:
        return []
    applies = {STRUCTURED_OUTPUT: params.structured_outputs is not None, CUSTOM_PROCESSORS: has_custom_processors}
    return [reason for reason in REASONS if applies[reason]]
