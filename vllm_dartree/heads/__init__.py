"""Correction heads: what makes a drafted branch depend on its own tokens.

Each head implements ``CorrectionHead`` (state, score, advance) and is built from the tensors of a checkpoint under
their published names.
"""

from vllm_dartree.heads.domino import DominoHead
from vllm_dartree.heads.marginal import MarginalHead
from vllm_dartree.heads.markov import MarkovHead
from vllm_dartree.heads.selector import SelectorHead
from vllm_dartree.heads.spec import DrafterConfigError, DrafterSpec

__all__ = ["DominoHead", "DrafterConfigError", "DrafterSpec", "MarginalHead", "MarkovHead", "SelectorHead"]
