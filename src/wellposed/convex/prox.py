r"""Activations as gradients of convex functions, and the conjugates of these.

An activation s is non-decreasing and 1-Lipschitz, so it is the derivative of a convex S (its `primitive`, S(0) = 0) and the
proximal operator of a potential p. The two are tied by

    S*(y) = p(y) + y^2/2 - constant,        S(v) + S*(y) >= v y  with equality where y = s(v)                  (1)

(Moreau). S* is what [xie2021] writes with a tilde and a star; for ReLU it is y^2/2 on y >= 0 (the paper prints y > 0, but
inactive units sit exactly at 0) and infinite elsewhere.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wellposed.nn import AbstractActivation

__all__ = ["primitive_conjugate", "value_range"]


def value_range(activation: AbstractActivation) -> tuple[float, float]:
    """The closed range [s(-inf), s(inf)] of an activation: where the conjugate of its primitive may be finite."""
    ends = activation(torch.tensor([-math.inf, math.inf], dtype=torch.float64))
    return float(ends[0]), float(ends[1])


def primitive_conjugate(activation: AbstractActivation, y: Tensor) -> Tensor:
    """S*(y) elementwise, by (1): the conjugate of the primitive of s, at least 0, infinite outside the range of s.

    Args:
        activation: s.
        y: Any shape.
    """
    lowest = activation(torch.zeros((), dtype=torch.float64))  # S*(s(0)) = 0 s(0) - S(0) = 0
    constant = float(activation.potential(lowest) + lowest.square() / 2)
    return activation.potential(y) + (y.square() / 2 - constant)
