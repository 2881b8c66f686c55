"""Taking a head's tensors out of a checkpoint."""

from collections.abc import Mapping

from torch import Tensor


class HeadTensorError(ValueError):
    """A tensor of a head is missing or has a wrong shape; the message names it."""


def take(tensors: Mapping[str, Tensor], name: str, shape: tuple[int | None, ...]) -> Tensor:
    """``tensors[name]``, checked against ``shape``, in which None stands for any size."""
    if name not in tensors:
        raise HeadTensorError(f"the drafter's checkpoint has no tensor '{name}', which its head needs")
    actual = tuple(tensors[name].shape)
    if len(actual) != len(shape) or any(
        want is not None and want != size for want, size in zip(shape, actual, strict=True)
    ):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise HeadTensorError(f"the drafter's tensor '{name}' has shape {list(actual)}; its config needs [{wanted}]")
    return tensors[name]
