"""Scalars rounded outward: what bounds are computed with."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wellposed.linalg.scaling import ldexp_down, ldexp_up, scaled

__all__ = ["LARGEST", "down", "rate_after", "up", "vector_norm_lower", "vector_norm_upper"]

_UNIT = 2.0**-53
#: Relative rounding of a chain of a few hundred float64 operations on scalars, generously.
_SCALAR = 2.0**-40
#: What underflow takes away from the last products of the chain, generously: each loses at most 2^-1075.
_TINY = 2.0**-1060
LARGEST = math.nextafter(math.inf, 0.0)


def up(value: float) -> float:
    """A little more than `value`: covers the rounding of the scalar arithmetic that made it, if nothing cancels in it.

    Never NaN. What has become NaN is not bounded, so the answer is infinity. A 0 may be a product that underflowed, so the
    answer is positive. Minus infinity may be a sum that overflowed, so the answer is the least finite number.
    """
    if math.isnan(value):
        return math.inf
    return -LARGEST if value == -math.inf else value + abs(value) * _SCALAR + _TINY


def down(value: float) -> float:
    """A little less than `value`, as `up` from the other side: never NaN, and down(inf) is the largest finite number."""
    return -up(-value)


def rate_after(decrease: float) -> float:
    """1 - decrease from above, where `up` would lose a decrease below 1e-12; 1 if none is left after rounding."""
    return min(1.0, math.nextafter(1.0 - max(0.0, down(decrease)), math.inf))


def vector_norm_upper(v: Tensor) -> float:
    """Upper bound of the Euclidean norm of all entries, in float64, wherever they lie in its range."""
    norm, exponent, rounding = _norm(v)
    return ldexp_up(up(norm * (1.0 + rounding)), exponent)


def vector_norm_lower(v: Tensor) -> float:
    """Lower bound of the Euclidean norm of all entries, in float64, at least 0."""
    norm, exponent, rounding = _norm(v)
    return max(0.0, ldexp_down(down(norm * (1.0 - rounding)), exponent))


def _norm(v: Tensor) -> tuple[float, int, float]:
    """The norm as a number and a power of 2, and its relative rounding: a square root of a sum in any order."""
    A, exponent = scaled(v.detach().double())
    return float(torch.linalg.vector_norm(A)), exponent, (A.numel() + 4) * _UNIT
