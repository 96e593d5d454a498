"""What images and data must be, in one sentence."""

from __future__ import annotations

import torch
from torch import Tensor

from wellposed.errors import InvalidArgument, InvalidType


def check_numbers(owner: str, x: Tensor, *, what: str = "images", complex_too: bool = False) -> None:
    """`what` must have floating-point entries."""
    if not (x.is_floating_point() or (complex_too and x.is_complex())):
        raise InvalidType(f"{owner} expects {what} of floating-point numbers; got {x.dtype}. Convert them, e.g. by .float().")


def check_mask(owner: str, mask: Tensor, shape: torch.Size) -> None:
    """The mask must not enlarge what it multiplies."""
    pairs = zip(reversed(mask.shape), reversed(shape), strict=False)
    if mask.dim() > len(shape) or any(size not in (1, of) for size, of in pairs):
        raise InvalidArgument(
            f"{owner} has a mask of shape {tuple(mask.shape)}, which does not fit what it measures; got {tuple(shape)}."
        )
