"""Tensors rounded outward: norms that do not vanish or overflow, and conversions that keep an upper
bound one."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["round_up", "row_norms_upper"]


def row_norms_upper(A: Tensor) -> Tensor:
    """(n,) float64 upper bounds of the Euclidean norms of the rows, wherever their entries lie in
    its range.

    Args:
        A: (n, m) finite.
    """
    A = A.detach().double()
    largest = A.abs().amax(dim=1) if A.shape[1] else A.new_zeros(A.shape[0])
    scale = torch.where(largest > 0, largest, torch.ones_like(largest))
    norms = torch.linalg.vector_norm(A / scale.unsqueeze(1), dim=1) * (1.0 + (A.shape[1] + 8) * 2.0**-52)
    upper = torch.nextafter(norms * scale, torch.full_like(norms, torch.inf))
    return torch.where(largest > 0, upper, torch.zeros_like(upper))


def round_up(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The least numbers of the dtype that are not below x; infinite where there are none.

    Args:
        x: float64.
        dtype: float32 or float64.
    """
    near = x.to(dtype)
    return torch.where(near.double() < x, torch.nextafter(near, torch.full_like(near, torch.inf)), near)
