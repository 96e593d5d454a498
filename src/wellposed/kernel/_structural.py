r"""A lower bound on the least eigenvalue of a kernel from its features alone, without the kernel.

For positive semi-definite A and B, Schur's product theorem gives lambda_min(A o B) >= min_i A_ii lambda_min(B): with
B - lambda_min(B) I the product A o (B - lambda_min(B) I) is positive semi-definite, and A o I = diag(A). A factor with equal
names on both sides is a Gram matrix F F^T, whose least eigenvalue is sigma_min(F)^2, or 0 with more samples than columns. A
parameter whose products are all of that kind, with positive coefficients, adds the sum of its bounds; any other adds 0, since
the part of every parameter is a Gram matrix.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from wellposed.kernel._hadamard import ClosedRoad
from wellposed.linalg import least_singular_value_lower
from wellposed.nn.tangent import GramProduct

__all__ = ["structural_lower"]

_LARGEST = torch.finfo(torch.float64).max
#: More than a product, or a sum of a few of them, loses to underflow.
_TINY = torch.finfo(torch.float64).smallest_normal


def structural_lower(road: ClosedRoad) -> float:
    """Lower bound on the least eigenvalue of the kernel of a batch with itself, given its features; at least 0."""
    features, _ = road.sides
    known: dict[str, tuple[float, float]] = {}
    total = 0.0
    for terms in road.terms.values():
        if all(term.coefficient > 0 and all(a == b for a, b in term.factors) for term in terms):
            total += sum(_of_product(term, features, known) for term in terms)
    return _down(total)


def _of_product(term: GramProduct, features: Mapping[str, Tensor], known: dict[str, tuple[float, float]]) -> float:
    names = [name for name, _ in term.factors]
    for name in names:
        if name not in known:
            known[name] = (_least_square(features[name]), _least_gram_eigenvalue(features[name]))
    # Each factor in turn is the one whose eigenvalue is used; the others give their least diagonal entry.
    return _down(
        term.coefficient
        * max(
            known[chosen][1] * math.prod(known[name][0] for j, name in enumerate(names) if j != i)
            for i, chosen in enumerate(names)
        )
    )


def _least_square(F: Tensor) -> float:
    """Lower bound on min_i ||F_i||^2; the sum of k squares has relative error at most gamma_k."""
    k = F.shape[1] + 2
    squares = float(F.double().square().sum(dim=1).min())
    return _down(squares * (1.0 - 2.0 * k * torch.finfo(torch.float64).eps) - k * _TINY)


def _least_gram_eigenvalue(F: Tensor) -> float:
    """Lower bound on lambda_min(F F^T)."""
    if F.shape[0] > F.shape[1]:
        return 0.0
    least = least_singular_value_lower(F)
    return _down(least * least)


def _down(value: float) -> float:
    """A little less than a product of lower bounds, in spite of its rounding and of underflow; finite, and at least 0."""
    return max(0.0, min(value, _LARGEST) * (1.0 - 2.0**-40) - _TINY)
