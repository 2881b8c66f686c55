"""What a drafter checkpoint's ``config.json`` says about its block and its correction head."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

HeadKind = Literal["domino", "markov", "selector", "marginal"]

DOMINO_PROJECTORS = ("domino", "causal_v5")


class DrafterConfigError(ValueError):
    """A drafter's ``config.json`` lacks a key or has a value that cannot work; the message names the key."""


@dataclass(frozen=True)
class DrafterSpec:
    """The block and the head of a drafter checkpoint, read once and checked.

    ``block_size`` counts the anchor; ``sample_from_anchor`` tells that the anchor's own position predicts slot 1
    (``shift_label`` in Domino's configs), so that the block has one slot more.
    """

    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    head: HeadKind
    sample_from_anchor: bool = False
    gru_hidden_dim: int | None = None
    emb_dim: int | None = None
    pure_draft_prefix_len: int = 0
    markov_rank: int | None = None
    selector_top_k: int | None = None
    logit_scale: float = 1.0  # multiplies the base logits and the Markov head's bias

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
        """Reads a parsed ``config.json``; keys of ``dflash_config`` win over the top level's.

        Raises:
            DrafterConfigError: a key is missing or its value is outside of what is allowed.
        """
        nested = config.get("dflash_config") or {}

        def lookup(key: str, *, required_for: str | None = None) -> Any:
            value = nested.get(key, config.get(key))
            if value is None and required_for is not None:
                raise DrafterConfigError(
                    f"the drafter's config.json has no '{key}', which {required_for} needs; "
                    f"put it into 'dflash_config' or at the top level"
                )
            return value

        def positive_int(key: str, minimum: int, required_for: str) -> int:
            value = lookup(key, required_for=required_for)
            if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
                raise DrafterConfigError(
                    f"the drafter's config.json has {key}={value!r}; it must be an integer >= {minimum}"
                )
            return value

        layers = lookup("target_layer_ids", required_for="a block drafter")
        if not layers or not all(isinstance(layer, int) and layer >= 0 for layer in layers):
            raise DrafterConfigError(
                f"the drafter's config.json has target_layer_ids={layers!r}; "
                "it must list the target's layers (integers >= 0) whose outputs the drafter reads"
            )
        projector = lookup("projector_type")
        head: HeadKind = "marginal"
        fields: dict[str, Any] = {}
        if projector in DOMINO_PROJECTORS:
            head = "domino"
            fields["gru_hidden_dim"] = positive_int("gru_hidden_dim", 1, "the Domino head")
            fields["emb_dim"] = positive_int("emb_dim", 1, "the Domino head")
            if lookup("pure_draft_prefix_len") is not None:
                fields["pure_draft_prefix_len"] = positive_int("pure_draft_prefix_len", 0, "the Domino head")
        elif lookup("markov_rank") is not None:
            head = "markov"
            fields["markov_rank"] = positive_int("markov_rank", 1, "the Markov head")
        elif lookup("selector_top_k") is not None:
            head = "selector"
            fields["selector_top_k"] = positive_int("selector_top_k", 1, "the Selector head")
        elif projector not in (None, "dflash"):
            raise DrafterConfigError(
                f"the drafter's config.json has projector_type={projector!r}; "
                f"known are {', '.join(DOMINO_PROJECTORS)} (Domino head) and none (plain DFlash)"
            )
        # DSpark's own layout predicts from the anchor unless its config says otherwise; all others do not.
        from_anchor = lookup("shift_label" if head == "domino" else "sample_from_anchor")
        if from_anchor is None:
            from_anchor = head == "markov"
        return cls(
            block_size=positive_int("block_size", 2, "a block drafter"),
            mask_token_id=positive_int("mask_token_id", 0, "a block drafter"),
            target_layer_ids=tuple(layers),
            head=head,
            sample_from_anchor=bool(from_anchor),
            logit_scale=float(config.get("logit_scale", 1.0)),
            **fields,
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
