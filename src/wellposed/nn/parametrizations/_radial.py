"""The radial projection onto a ball, for any norm."""

from __future__ import annotations

from torch import Tensor

__all__ = ["radial"]


def radial(V: Tensor, norm: Tensor, bound: float) -> Tensor:
    """V min(1, bound/norm): V itself, to the last bit, inside the ball; and V = 0 has a derivative.

    Args:
        V: Any shape.
        norm: A scalar with its graph, in a precision of its own.
        bound: Positive.
    """
    limit = norm.new_tensor(bound)  # torch takes a number over a tensor as bound * (1/norm), which may not be 1 at the bound
    return V * (limit / norm.clamp(min=limit)).to(V.dtype)
