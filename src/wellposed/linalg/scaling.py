"""Powers of two: they move numbers to where nothing overflows, and back, without rounding."""

from __future__ import annotations

import math

from torch import Tensor

#: No factor 2^e with |e| up to here overflows or vanishes.
_STEP = 1000
_LARGEST = math.nextafter(math.inf, 0.0)


def exponent_of(A: Tensor) -> int:
    """e with the largest |entry| in [2^(e-1), 2^e); 0 if all entries are 0. They must be finite."""
    return math.frexp(float(A.detach().abs().max()))[1] if A.numel() else 0


def ldexp(A: Tensor, exponent: int) -> Tensor:
    """`A * 2^exponent`: exact, up to overflow and an error of 2^-1074 below 2^-1022."""
    while exponent:
        step = max(-_STEP, min(_STEP, exponent))
        A, exponent = A * 2.0**step, exponent - step
    return A


def scaled(A: Tensor) -> tuple[Tensor, int]:
    """`A * 2^-e` with its largest entry in [1/2, 1), and `e`."""
    e = exponent_of(A)
    return ldexp(A, -e), e


def ldexp_up(x: float, exponent: int) -> float:
    """An upper bound of `x * 2^exponent`: infinite where a positive one overflows."""
    try:
        return math.nextafter(math.ldexp(x, exponent), math.inf)
    except OverflowError:
        return math.inf if x > 0 else -_LARGEST


def ldexp_down(x: float, exponent: int) -> float:
    """A lower bound of `x * 2^exponent`: the largest number where a positive one overflows."""
    return -ldexp_up(-x, exponent)
