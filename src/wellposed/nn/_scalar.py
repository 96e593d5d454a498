"""Scalar functions, elementwise: the root of an increasing function, and the dilogarithm of the softplus potential."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["bernoulli_series", "increasing_root"]

#: B_n / (n + 1)! of n = 0, 1, 2, 4, 6, ...: the odd Bernoulli numbers beyond B_1 vanish.
_BERNOULLI = (
    (1, 1.0),
    (2, -1 / 4),
    (3, 1 / 36),
    (5, -1 / 3600),
    (7, 1 / 211680),
    (9, -1 / 10886400),
    (11, 1 / 526901760),
    (13, -691 / 2730 / math.factorial(13)),
    (15, 7 / 6 / math.factorial(15)),
    (17, -3617 / 510 / math.factorial(17)),
)
_MOST_STEPS = 200


def bernoulli_series(u: Tensor) -> Tensor:
    r"""sum_n B_n u^(n+1)/(n+1)! = Li_2(1 - exp(-u)), to rounding for |u| <= log 2.

    There a term is less than (log 2/2 pi)^2 = 0.013 of the one before it.
    """
    total = torch.zeros_like(u)
    for power, coefficient in reversed(_BERNOULLI):
        total = total + coefficient * u**power
    return total


def increasing_root(g: Callable[[Tensor], tuple[Tensor, Tensor]], low: Tensor, high: Tensor) -> Tensor:
    """The w in [low, high] with g(w) = 0, elementwise, by Newton steps that never leave a bracket which only shrinks.

    Args:
        g: w -> (value, derivative) of a non-decreasing function with g(low) <= 0 <= g(high).
        low, high: The bracket, of the same shape.
    """
    w = (low + high) / 2
    settled = ~w.isfinite()  # once a step is below rounding an element stays settled
    for _ in range(_MOST_STEPS):
        value, derivative = g(w)
        low, high = torch.where(value < 0, w, low), torch.where(value > 0, w, high)
        newton = w - value / derivative
        inside = (newton >= low) & (newton <= high)
        following = torch.where(inside, newton, (low + high) / 2)
        following = torch.where(value == 0, w, following)
        settled |= (following - w).abs() <= 4 * torch.finfo(w.dtype).eps * (1 + w.abs())
        w = following
        if bool(settled.all()):
            break
    return w
