"""Which inputs a statement about "every input" is about: those that a cell cannot tell from the one
that was followed, except by the values in their tensors.

The steps of a cell are those of one input. Its code may read the shape and the dtype of a tensor,
how many tensors there are, and whatever is not a tensor; so a statement names all of these.
"""

from __future__ import annotations

import enum
from typing import Any

import torch
from torch import Tensor

from wellposed._tree import describe
from wellposed.certify._followed import Followed

#: What is named by its value; of other objects the type is named.
_VALUES = (bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device, type(None))


def every_input(followed: Followed, *, every_size: bool) -> str:
    """As in "For every x of shape (batch, 3) in float32".

    Args:
        followed: The layer and its input.
        every_size: Whether the statement is about images of all sizes.
    """

    def leaf(value: Any) -> str:
        if not isinstance(value, Tensor):
            return repr(value) if isinstance(value, _VALUES) else f"this {type(value).__name__}"
        return f"{_shape(followed, value, every_size)} in {_name(value.dtype)}"

    kind = "of shape" if isinstance(followed.x, Tensor) else "of the form"
    where = "" if followed.owner is followed.layer else " that enters the layer"
    return f"every x {kind} {describe(followed.x, leaf)}{where}"


def states(followed: Followed, *, every_size: bool) -> str:
    """A remark on the states, where x leaves them open; empty if not."""
    x = followed.x
    with followed._apart(), torch.no_grad():
        layout = followed.layer._bind(x, followed.z0)[2]
    first = str(followed.batch) if followed.coupled else "batch"
    shapes = ["(" + ", ".join((first, *map(str, shape))) + (",)" if not shape else ")") for shape in layout.shapes]
    dtype = "" if isinstance(x, Tensor) and x.dtype == layout.dtype else f" in {_name(layout.dtype)}"
    like_x = isinstance(x, Tensor) and layout.shapes == (x.shape[1:],)
    parts = [] if (like_x and not dtype) or every_size else [f"states of shape {', '.join(shapes)}{dtype}"]
    parts += [f"batches of {followed.batch} coupled rows"] if followed.coupled else []
    return f" ({', '.join(parts)})" if parts else ""


def _shape(followed: Followed, tensor: Tensor, every_size: bool) -> str:
    sizes = [str(size) for size in tensor.shape]
    if followed._per_sample(tensor) and not followed.coupled:
        sizes[0] = "batch"
    if every_size:
        sizes[2:] = ["any"] * len(sizes[2:])
    return "(" + ", ".join(sizes) + (",)" if len(sizes) == 1 else ")")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
