"""The kinds of drafters that the engine drives, each in a module here with its ``DraftModel``.

All modules are imported, so that a new one needs no mention anywhere else.
"""

import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

from vllm_dartree.engine.draft_models.base import KINDS, Drafted, DraftModel
from vllm_dartree.heads import DrafterSpec

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["KINDS", "DraftModel", "Drafted", "kind_of", "refusal"]


def kind_of(spec: DrafterSpec) -> type[DraftModel]:
    """The kind that drives drafters with this head."""
    return next(kind for kind in KINDS if spec.head in kind.heads)


def refusal(config: Mapping[str, Any]) -> str | None:
    """Why a checkpoint with this ``config.json`` cannot be driven, going by its architecture; None if it can."""
    names = config.get("architectures") or []
    for name in names:
        for kind in KINDS:
            reason = kind.refused.get(name) or (name in kind.architectures and kind.refusal(config))
            if reason:
                return f"architectures={names}, which method 'dartree' does not drive: {reason}"
    known = sorted(name for kind in KINDS for name in kind.architectures)
    if not set(names).intersection(known):
        return f"architectures={names}; method 'dartree' drives drafters with {' or '.join(known)}"
    return None
