"""Correction heads: what makes a drafted branch depend on its own tokens.

A module defines one kind of drafter: a ``CorrectionHead`` (state, score, advance) and a ``DrafterSpec`` that reads its
keys of ``config.json``. All modules here are imported, so that a new one needs no mention anywhere else.
"""

import importlib
import pkgutil

from vllm_dartree.heads.domino import DominoHead
from vllm_dartree.heads.marginal import MarginalHead
from vllm_dartree.heads.markov import MarkovHead
from vllm_dartree.heads.selector import ScoredBlock, SelectorHead
from vllm_dartree.heads.spec import KINDS, DrafterConfigError, DrafterSpec

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = [
    "KINDS",
    "DominoHead",
    "DrafterConfigError",
    "DrafterSpec",
    "MarginalHead",
    "MarkovHead",
    "ScoredBlock",
    "SelectorHead",
]
