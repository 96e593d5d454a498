"""One-sided arithmetic: powers of two, scalars rounded outward, norms bounded from a given side.

Powers of two move numbers to where nothing overflows, and back, without rounding.

`linalg.bounds` proves norms from above and least singular values from below; the bounds from the
other side, which refute a hypothesis instead of proving it, are here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

#: Unit roundoff of float64.
ROUNDING = 2.0**-53
#: What underflow takes, at most, from the norm of a vector of up to 2^60 entries: each square loses at most 2^-1075.
UNDERFLOW = 2.0**-500
LARGEST = math.nextafter(math.inf, 0.0)
#: Relative rounding of a chain of a few hundred float64 operations on scalars, generously.
_SCALAR = 2.0**-40
#: What underflow takes away from the last products of the chain, generously: each loses at most 2^-1075.
_TINY = 2.0**-1060
#: No factor 2^e with |e| up to here overflows or vanishes.
_STEP = 1000


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
        return math.inf if x > 0 else -LARGEST


def ldexp_down(x: float, exponent: int) -> float:
    """A lower bound of `x * 2^exponent`: the largest number where a positive one overflows."""
    return -ldexp_up(-x, exponent)


def up(value: float) -> float:
    """A little more than `value`: covers the rounding of the scalar arithmetic that made it, if
    nothing cancels in it.

    Never NaN. What has become NaN is not bounded, so the answer is infinity. A 0 may be a product
    that underflowed, so the answer is positive. Minus infinity may be a sum that overflowed, so the
    answer is the least finite number.
    """
    if math.isnan(value):
        return math.inf
    return -LARGEST if value == -math.inf else value + abs(value) * _SCALAR + _TINY


def down(value: float) -> float:
    """A little less than `value`, as `up` from the other side: never NaN, and down(inf) is the
    largest finite number."""
    return -up(-value)


def rate_after(decrease: float) -> float:
    """1 - decrease from above, where `up` would lose a decrease below 1e-12; 1 if none is left
    after rounding."""
    return min(1.0, math.nextafter(1.0 - max(0.0, down(decrease)), math.inf))


@dataclass(frozen=True)
class DataUnit:
    """Data are in units of 2^exponent: what grows like the p-th power of the inputs has the unit
    2^(p exponent)."""

    exponent: int = 0

    def upper(self, value: float, power: int = 1) -> float:
        """`value` of the data as they were given, from above."""
        return ldexp_up(up(value), power * self.exponent) if self.exponent else value

    def lower(self, value: float, power: int = 1) -> float:
        """`value` of the data as they were given, from below."""
        return max(0.0, ldexp_down(down(value), power * self.exponent)) if self.exponent and value >= 0 else value

    def around(self, bounds: tuple[float, float], power: int) -> tuple[float, float]:
        """A lower and an upper bound of the data as they were given; the lower one may be
        negative."""
        lower, upper = bounds
        if not self.exponent:
            return bounds
        return ldexp_down(down(lower), power * self.exponent), ldexp_up(up(upper), power * self.exponent)

    def exact(self, value: float, power: int) -> float:
        """`value` of the data as they were given, exactly; 0 or infinity where a normal float64
        does not hold it."""
        if not self.exponent:
            return value
        try:
            number = math.ldexp(value, power * self.exponent)
        except OverflowError:
            return math.inf
        return number if abs(number) >= 2.0**-1022 else 0.0

    def sides(self, value: float, bound: float, power: int) -> tuple[float, float, str]:
        """Both sides of a comparison of the data as they were given, so that it reads as it was
        made; and a note.

        Where float64 does not hold one of them exactly, both stay in the unit, and the note says
        so.
        """
        given = self.exact(value, power), self.exact(bound, power)
        if all((a == 0) == (b == 0) and math.isinf(a) == math.isinf(b) for a, b in zip((value, bound), given, strict=True)):
            return *given, ""
        return value, bound, f"both sides in units of 2^{power * self.exponent}"


def vector_norm_upper(v: Tensor) -> float:
    """Upper bound of the Euclidean norm of all entries, in float64, wherever they lie in its
    range."""
    norm, exponent, rounding = _norm_of_all(v)
    return ldexp_up(up(norm * (1.0 + rounding)), exponent)


def vector_norm_lower(v: Tensor) -> float:
    """Lower bound of the Euclidean norm of all entries, in float64, at least 0."""
    norm, exponent, rounding = _norm_of_all(v)
    return max(0.0, ldexp_down(down(norm * (1.0 - rounding)), exponent))


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


def spectral_norm_lower(M: Tensor) -> float:
    """Lower bound of |M|: |M v|/|v| for the singular vector v that was computed, less the rounding
    of the product.

    Args:
        M: (m, k) finite.
    """
    M, exponent = scaled(M.detach().double().cpu())
    v = torch.linalg.svd(M, full_matrices=False).Vh[0]
    return max(0.0, ldexp_down(down((_norm(M @ v) - _rounding(M, v)) / _norm(v)), exponent))


def least_singular_value_upper(Z: Tensor) -> float:
    """Upper bound of sigma_min(Z) over its n <= m rows: |Z^T u|/|u| for the singular vector u that
    was computed.

    Args:
        Z: (n, m) finite, n <= m.
    """
    Z, exponent = scaled(Z.detach().double().cpu())
    u = torch.linalg.svd(Z, full_matrices=False).U[:, -1]
    return ldexp_up(up((_norm(Z.t() @ u) + _rounding(Z, u)) / _norm(u)), exponent)


def _norm_of_all(v: Tensor) -> tuple[float, int, float]:
    """The norm as a number and a power of 2, and its relative rounding: a square root of a sum in
    any order."""
    A, exponent = scaled(v.detach().double())
    return _norm(A), exponent, (A.numel() + 4) * ROUNDING


def _norm(v: Tensor) -> float:
    return float(torch.linalg.vector_norm(v))


def _rounding(M: Tensor, v: Tensor) -> float:
    """|fl(M v) - M v| <= gamma_k |M|_F |v| (Chapter 3 of [higham2002]), doubled: far more than
    underflow takes from norms."""
    return 2 * (max(M.shape) + 4) * ROUNDING * _norm(M) * _norm(v)
