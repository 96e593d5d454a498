"""Draws that torch has no single function for."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["signs"]


def signs(
    size: int,
    *,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """(size,) of +1 and -1 with equal probability."""
    dtype = torch.get_default_dtype() if dtype is None else dtype
    return torch.randint(0, 2, (size,), generator=generator, device=device).to(dtype) * 2 - 1
