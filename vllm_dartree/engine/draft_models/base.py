"""What the speculator asks of a drafter's model, whichever kind it is."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from vllm_dartree.heads import DrafterSpec
from vllm_dartree.tree import CorrectionHead, DraftBlock


@dataclass
class Drafted:
    """What one drafter forward gave for ``R`` requests."""

    anchor: Tensor  # [R] int64
    hidden: Tensor  # [R, L, H], of each slot
    # [R, H], the combined features of the last token before the anchor, where the kind ``reads_context``.
    context: Tensor | None


class DraftModel(ABC):
    """One kind of drafter: which checkpoints it is, and how a block is had from vLLM's model of them.

    The class attributes are read while vLLM makes its configuration, in every process, so a module with a kind imports
    vLLM's models inside its functions only.

    Args:
        model: vLLM's model, its weights loaded, embedding and LM head shared with the target.
        spec: the block and the head of its checkpoint.
        candidates: ``K``.
        target: the target model.
    """

    name: ClassVar[str]  # as messages call it
    heads: ClassVar[tuple[str, ...]]  # kinds of ``DrafterSpec.head``
    architectures: ClassVar[tuple[str, ...]]  # in the checkpoint's config.json
    refused: ClassVar[Mapping[str, str]] = {}  # relatives that cannot be driven, and why
    method: ClassVar[str]  # vLLM's own that loads it: dflash or dspark
    top_k_key: ClassVar[str | None] = None  # of speculative_config, which sets the candidates that it looks at
    vllm_model: ClassVar[str | None] = None  # "module:Class" of our version of vLLM's model, where we need one

    reads_context: ClassVar[bool] = False  # whether ``block`` looks at ``Drafted.context``

    head: CorrectionHead

    def __init_subclass__(cls) -> None:
        KINDS.append(cls)

    def __init__(self, model: nn.Module, spec: DrafterSpec, candidates: int, target: nn.Module) -> None:
        self.model, self.spec, self.candidates = model, spec, candidates

    @abstractmethod
    def block(self, drafted: Drafted) -> DraftBlock:
        """The ``K`` best candidates of every slot, with what the head wants besides."""

    @classmethod
    def refusal(cls, config: Mapping[str, Any]) -> str | None:
        """Why a checkpoint of one of the ``architectures`` with this ``config.json`` cannot be driven all the same."""
        return None

    @classmethod
    def native_keys(cls, candidates: int) -> dict[str, Any]:
        """Keys of ``speculative_config`` that vLLM's method needs, so that its model serves ``K`` candidates."""
        return {}

    @classmethod
    def registered_name(cls) -> str:
        """The architecture under which vLLM finds ``vllm_model``: its own methods keep its own models."""
        return f"Dartree{cls.__name__}"


# Filled by the modules of this package, each of which defines a kind.
KINDS: list[type[DraftModel]] = []
