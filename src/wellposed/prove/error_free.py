r"""Sums and products of float64 numbers without rounding, and bounds of the rounding elsewhere.

A number that has to be known better than to 16 digits is kept as an unevaluated sum high + low. A
product of matrices is split so that its leading part has no rounding at all: if the entries of A1
and B1 are integers of at most b bits, times one power of 2 per row, and 2 b + log2(k) <= 53, then
every partial sum of A1 B1^T is an integer of at most 53 bits, whatever the order of summation.

The rest of the product is small, and has the error gamma_k |A| |B| of Chapter 3 of [higham2002].
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

#: Unit roundoff of float64.
UNIT = 2.0**-53
#: Relative rounding of a few hundred operations on scalars or on vectors without cancellation, generously.
SLACK = 1.0 + 2.0**-36
#: More than squares that underflow can take from a norm.
_TINY = 1e-150


def gamma(terms: int) -> float:
    """gamma_k = k u/(1 - k u) for k = `terms` and eight operations more, from above."""
    k = (terms + 8) * UNIT
    return 1.001 * k / (1.0 - k)


def two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """(s, t) with s = fl(a + b) and s + t = a + b exactly (Knuth)."""
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


def two_product(a: Tensor, factor: float | Tensor) -> tuple[Tensor, Tensor]:
    """(p, q) with p = fl(a factor) and p + q = a factor exactly (Dekker), unless it underflows."""
    p = a * factor
    big = 134217729.0  # 2^27 + 1
    a1 = a * big - (a * big - a)
    f1 = factor * big - (factor * big - factor)
    a2, f2 = a - a1, factor - f1
    return p, ((a1 * f1 - p) + a1 * f2 + a2 * f1) + a2 * f2


def split(A: Tensor, terms: int, *, common: bool = False) -> tuple[Tensor, Tensor]:
    """A = A1 + A2 exactly, where A1 has so few bits that a product A1 B1^T with `terms` terms is
    exact.

    Args:
        A: (n, k) finite.
        terms: How many products are added up for an entry of the product.
        common: Whether all rows have one unit, so that products with columns are exact too.
    """
    bits = (53 - math.ceil(math.log2(max(terms, 2)))) // 2
    top = A.abs().amax().reshape(1, 1) if common else A.abs().amax(dim=1, keepdim=True)
    _, exponent = torch.frexp(torch.where(top > 0, top, torch.ones_like(top)))  # top < 2^exponent
    sigma = torch.ldexp(torch.full_like(top, 1.5), exponent - bits + 52)
    A1 = (A + sigma) - sigma
    return A1, A - A1


def outer_sum(A: Tensor, A_low: Tensor, B: Tensor, B_low: Tensor) -> tuple[Tensor, Tensor, float]:
    """sum_i a_i b_i^T over the rows of A + A_low and B + B_low: a product without rounding, the
    rest of it, and a bound of the error of their sum in the Frobenius norm.

    Args:
        A, A_low: (n, m). B, B_low: (n, k).
    """
    n = A.shape[0]
    A1, A2 = split(A.T.contiguous(), n)
    B1, B2 = split(B.T.contiguous(), n)
    rest_B = B2 + B_low.T
    rest = torch.cat([A2, A.T, A_low.T], dim=1) @ torch.cat([B1, rest_B, B.T], dim=1).T
    sizes = norm_up(A2) * norm_up(B1) + norm_up(A) * norm_up(rest_B) + norm_up(A_low) * norm_up(B)
    return A1 @ B1.T, rest, (gamma(3 * n) * sizes + norm_up(A_low) * norm_up(B_low)) * SLACK


def norm_up(A: Tensor) -> float:
    """Upper bound of the Euclidean norm of all entries, of up to 1e20 entries below 1e150."""
    return float(torch.linalg.vector_norm(A)) * (SLACK + (A.numel() + 8) * UNIT) + _TINY


def rows_up(A: Tensor) -> Tensor:
    """(n,) upper bounds of the norms of the rows, as `norm_up`."""
    return torch.linalg.vector_norm(A, dim=1) * (SLACK + (A.shape[1] + 8) * UNIT) + _TINY
