"""One-sided arithmetic: scalars rounded outward, and norms bounded from a given side.

`linalg.bounds` proves norms from above and least singular values from below; the bounds from the
other side, which refute a hypothesis instead of proving it, are here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.linalg.bounds import spectral_norm_upper
from wellposed.linalg.scaling import ldexp_down, ldexp_up, scaled
from wellposed.linalg.verified_cholesky import norm_is_below

#: Unit roundoff of float64.
ROUNDING = 2.0**-53
#: What underflow takes, at most, from the norm of a vector of up to 2^60 entries: each square loses at most 2^-1075.
UNDERFLOW = 2.0**-500
LARGEST = math.nextafter(math.inf, 0.0)
#: Relative rounding of a chain of a few hundred float64 operations on scalars, generously.
_SCALAR = 2.0**-40
#: What underflow takes away from the last products of the chain, generously: each loses at most 2^-1075.
_TINY = 2.0**-1060
_POWER_STEPS = 24
_FLOOR = 2.0**-6


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
    """(n,) upper bounds of the norms of the rows, up to their relative rounding."""
    return torch.linalg.vector_norm(A, dim=1) + UNDERFLOW


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


def restricted_norm_upper(R: Tensor, possible: Tensor) -> float:
    """Upper bound of max_i |R_{S_i S_i}|.

    A power iteration for all samples guesses the largest, and a Cholesky test per sample proves it,
    or a guess a little higher. Costs about one product of the restricted matrix with itself per
    sample.

    Args:
        R: (m, m) float64.
        possible: (n, m) bool, the sets S_i.
    """
    whole = spectral_norm_upper(R)
    S = possible.to(R.dtype)
    v = S / torch.linalg.vector_norm(S, dim=1, keepdim=True).clamp(min=1.0)
    norms = v.new_zeros(v.shape[0])
    for _ in range(_POWER_STEPS):
        w = (v @ R.t()) * S
        norms = torch.linalg.vector_norm(w, dim=1)
        u = (w @ R) * S
        v = u / torch.linalg.vector_norm(u, dim=1, keepdim=True).clamp(min=1e-300)
    # a start that the matrix annihilates guesses 0, from where no factor leads up
    bound = min(whole, max(1.005 * float(norms.max()), _FLOOR * whole))
    # the hardest first: then the bound is not raised again and again
    for i in torch.argsort(norms, descending=True).tolist():
        index = possible[i].nonzero().squeeze(1)
        part = R[index][:, index].contiguous()
        growth = 1.01
        while bound < whole and not norm_is_below(part, bound):
            bound, growth = min(whole, bound * growth), growth**2
        if bound >= whole:
            return whole
    return bound


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
