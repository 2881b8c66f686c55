"""The knobs of a tree, checked once."""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

TreeVariant = Literal["pruned", "fixed", "chain"]


class TreeConfigError(ValueError):
    """A knob of the tree is outside of what is allowed; the message names it, its value and the allowed values."""

    def in_words_of(self, keys: Mapping[str, str]) -> str:
        """The message with a user's words for the knobs.

        Args:
            keys: field of ``TreeConfig``: what the user knows it as.
        """
        fields = "|".join(keys)
        # A knob is meant where the message gives its value, or says what to do with it.
        mentioned = rf"\b({fields})(?= is )|(?<=lower |raise )({fields})\b"
        return re.sub(mentioned, lambda match: keys[match[0]], str(self))


@dataclass(frozen=True)
class TreeConfig:
    """The shape of the draft tree.

    Args:
        budget: ``B``, nodes that the target verifies besides the anchor. Where the supertree is smaller than that
            (``width * depth`` nodes), the whole supertree is kept and the rows left over are dead.
        width: ``W``, live branches per depth. ``pruned`` alone uses it.
        candidates: ``K``, candidates per slot.
        depth_bonus: ``beta <= 0``, added to a node's key once per depth; 0 orders nodes by path probability alone.
        variant: ``pruned`` grows ``width`` branches at every depth and keeps the best ``budget`` nodes; ``fixed``
            grows ``ceil(remaining budget / remaining depths)`` branches, so exactly ``budget`` nodes; ``chain``
            is the corrected top-1 chain.
        depth: deepest slot that the tree uses; None uses all slots of the drafter's block.

    Raises:
        TreeConfigError: on values that cannot work together.
    """

    budget: int = 64
    width: int = 12
    candidates: int = 64
    depth_bonus: float = -0.2
    variant: TreeVariant = "pruned"
    depth: int | None = None

    def __post_init__(self) -> None:
        for name in ("budget", "width", "candidates", "depth"):
            value = getattr(self, name)
            if name == "depth" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise TreeConfigError(f"{name} is {value!r}, but it must be an integer >= 1")
        if self.variant not in get_args(TreeVariant):
            raise TreeConfigError(f"variant is {self.variant!r}; it must be one of {', '.join(get_args(TreeVariant))}")
        is_number = isinstance(self.depth_bonus, (int, float)) and not isinstance(self.depth_bonus, bool)
        # The largest float bounds integers, too, which have no infinity.
        if not is_number or not -sys.float_info.max <= self.depth_bonus <= 0:
            raise TreeConfigError(
                f"depth_bonus is {self.depth_bonus!r}, but it must be a finite number <= 0: with a positive bonus a "
                "child could outrank its parent and the best nodes would no longer form a tree"
            )
        if self.variant == "pruned" and self.width > self.candidates:
            raise TreeConfigError(
                f"width is {self.width} and candidates is {self.candidates}, but the anchor has only as many children "
                "as there are candidates; lower width or raise candidates"
            )

    def widths(self, num_slots: int) -> tuple[int, ...]:
        """Branches to grow at each depth, ``1..len(result)``.

        Args:
            num_slots: ``L``, the slots that the drafter predicts.

        Raises:
            TreeConfigError: ``depth`` is larger than the block, or ``fixed`` would need more children of the
                anchor than there are candidates.
        """
        if self.depth is not None and self.depth > num_slots:
            raise TreeConfigError(
                f"depth is {self.depth}, but the drafter's block has {num_slots} slots after the anchor; "
                f"it must be at most {num_slots}"
            )
        depth = min(self.depth or num_slots, self.budget)  # a node has all its ancestors beside it
        match self.variant:
            case "pruned":
                return (self.width,) * depth
            case "chain":
                return (1,) * depth
        widths: list[int] = []
        remaining = self.budget
        for left in range(depth, 0, -1):
            width = -(-remaining // left)
            widths.append(width)
            remaining -= width
        if widths[0] > self.candidates:
            raise TreeConfigError(
                f"budget is {self.budget} over {depth} depths, so the fixed variant grows {widths[0]} children of the "
                f"anchor, but candidates is {self.candidates}; lower budget or raise candidates"
            )
        return tuple(widths)
