"""What a drafter checkpoint's ``config.json`` says about its block and its correction head."""

import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from vllm_dartree.tree import CorrectionHead


class DrafterConfigError(ValueError):
    """A drafter's ``config.json`` lacks a key or has a value that cannot work; the message names the key."""


class ConfigKeys:
    """The keys of a parsed ``config.json``; those of its ``dflash_config`` win over the top level's."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config, self._nested = config, config.get("dflash_config") or {}
        if not isinstance(self._nested, Mapping):
            raise DrafterConfigError(
                f"the drafter's config.json has dflash_config={self._nested!r}; it must be an object with keys"
            )

    def get(self, *names: str) -> Any:
        """The value of the first name that has one; None if none has."""
        values = (self._nested.get(name, self._config.get(name)) for name in names)
        return next((value for value in values if value is not None), None)

    def require(self, *names: str, needed_by: str) -> Any:
        value = self.get(*names)
        if value is None:
            raise DrafterConfigError(
                f"the drafter's config.json has no '{names[0]}', which {needed_by} needs; "
                "put it into 'dflash_config' or at the top level"
            )
        return value

    def integer(self, *names: str, minimum: int, needed_by: str) -> int:
        value = self.require(*names, needed_by=needed_by)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise DrafterConfigError(
                f"the drafter's config.json has {names[0]}={value!r}; it must be an integer >= {minimum}"
            )
        return value


@dataclass(frozen=True)
class DrafterSpec:
    """The block and the head of a drafter checkpoint, read once and checked; each kind of drafter has a subclass.

    ``block_size`` counts the anchor; ``sample_from_anchor`` tells that the anchor's own position predicts slot 1, so
    that the block has one slot more.
    """

    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    sample_from_anchor: bool = False
    logit_scale: float = 1.0  # multiplies the base logits and the Markov head's bias
    top_k: int | None = None  # the candidates that the drafter itself looks at, which K may not exceed; None: all

    head: ClassVar[str]
    anchor_key: ClassVar[str] = "sample_from_anchor"
    samples_from_anchor_by_default: ClassVar[bool] = False  # where the config does not say
    tensor_prefixes: ClassVar[tuple[str, ...]] = ()  # of the head's tensors in the checkpoint

    def __init_subclass__(cls) -> None:
        KINDS[cls.head] = cls

    @classmethod
    def claims(cls, keys: ConfigKeys) -> bool:
        """Whether a config is one of this kind."""
        raise NotImplementedError

    @classmethod
    def own_fields(cls, keys: ConfigKeys) -> dict[str, Any]:
        """The fields that this kind has besides those that all have."""
        return {}

    def make_head(self, tensors: Mapping[str, Tensor], embed: Callable[[Tensor], Tensor]) -> CorrectionHead:
        """The head, out of the checkpoint's tensors and the target's embedding (ids ``[...]`` to ``[..., H]``).

        Raises:
            HeadTensorError: a tensor is missing or has a wrong shape.
        """
        raise DrafterConfigError(f"a {self.head} head cannot be had without the drafter's whole model")

    def tensor_shapes(self, hidden: int, vocabulary: int, names: Collection[str] = ()) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the head's tensors in a checkpoint, where vLLM does not load them itself.

        Args:
            names: of the tensors that the checkpoint has, for kinds of which some are optional.
        """
        return {}

    def num_weights(self, hidden: int, vocabulary: int) -> int | None:
        """Numbers that the head's weights hold, on every rank; None where that is not told by the config."""
        return None

    @property
    def num_slots(self) -> int:
        """``L``: the number of positions after the anchor that one drafter forward predicts."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def first_slot_row(self) -> int:
        """The row of the block whose hidden state predicts slot 1: the anchor's (0) or the first mask's (1)."""
        return 0 if self.sample_from_anchor else 1

    @property
    def num_query_rows(self) -> int:
        """Rows of one drafter forward, ``[anchor, mask, mask, ...]``."""
        return self.first_slot_row + self.num_slots

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "DrafterSpec":
        """Reads a parsed ``config.json`` as the kind that claims it.

        Raises:
            DrafterConfigError: a key is missing or its value is outside of what is allowed.
        """
        keys = ConfigKeys(config)
        layers = keys.require("target_layer_ids", "dspark_target_layer_ids", needed_by="a block drafter")
        is_list = isinstance(layers, list | tuple) and bool(layers)
        if not is_list or not all(type(layer) is int and layer >= 0 for layer in layers):
            raise DrafterConfigError(
                f"the drafter's config.json has target_layer_ids={layers!r}; "
                "it must list the target's layers (integers >= 0) whose outputs the drafter reads"
            )
        scale = config.get("logit_scale") or 1.0
        if not isinstance(scale, int | float) or not abs(scale) <= sys.float_info.max:
            raise DrafterConfigError(f"the drafter's config.json has logit_scale={scale!r}; it must be a number")
        claiming = [kind for kind in KINDS.values() if kind.claims(keys)]
        if not claiming:
            raise DrafterConfigError(
                f"the drafter's config.json has projector_type={keys.get('projector_type')!r}, which no head here "
                f"knows; there are heads of the kinds {', '.join(KINDS)}"
            )
        # A plain drafter has no key of its own: it is what no other kind claims.
        kind = min(claiming, key=lambda kind: kind.head == "marginal")
        from_anchor = keys.get(kind.anchor_key)
        return kind(
            block_size=keys.integer("block_size", "dspark_block_size", minimum=2, needed_by="a block drafter"),
            mask_token_id=keys.integer(
                "mask_token_id", "dspark_noise_token_id", minimum=0, needed_by="a block drafter"
            ),
            target_layer_ids=tuple(layers),
            sample_from_anchor=kind.samples_from_anchor_by_default if from_anchor is None else bool(from_anchor),
            logit_scale=float(scale),
            **kind.own_fields(keys),
        )

    def check_target(
        self, *, drafter_hidden: int, drafter_vocab: int, hidden_size: int, vocab_size: int, num_layers: int
    ) -> None:
        """Refuses a drafter that cannot belong to the target.

        Args:
            drafter_hidden, drafter_vocab: ``hidden_size`` and ``vocab_size`` of the drafter's config.
            hidden_size, vocab_size, num_layers: the target's.

        Raises:
            DrafterConfigError: naming the key, its value and the target's.
        """
        if drafter_hidden != hidden_size:
            raise DrafterConfigError(
                f"the drafter's hidden_size is {drafter_hidden} but the target's is {hidden_size}; "
                "they share embedding and LM head, so use the drafter that was trained for this target"
            )
        if drafter_vocab != vocab_size:
            raise DrafterConfigError(
                f"the drafter's vocab_size is {drafter_vocab} but the target's is {vocab_size}; "
                "use the drafter that was trained for this target"
            )
        if max(self.target_layer_ids) >= num_layers:
            raise DrafterConfigError(
                f"the drafter's target_layer_ids are {list(self.target_layer_ids)}, but the target has {num_layers} "
                f"layers, so ids go from 0 to {num_layers - 1}"
            )
        if self.mask_token_id >= vocab_size:
            raise DrafterConfigError(
                f"the drafter's mask_token_id is {self.mask_token_id}, but the target's vocabulary has {vocab_size} "
                f"tokens, so ids go from 0 to {vocab_size - 1}"
            )


# Filled by the modules of this package, each of which defines its kind.
KINDS: dict[str, type[DrafterSpec]] = {}
