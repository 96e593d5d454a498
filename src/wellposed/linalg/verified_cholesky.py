r"""A lower bound on the least eigenvalue by a Cholesky factorization that is checked afterwards.

If a floating-point Cholesky factorization of A - c I runs to completion, A is nearly at least c [rump2006]: the computed
factor satisfies L L^T = A - c I + D with |D_ij| <= gamma_{n+1}/(1 - gamma_{n+1}) sqrt(a_ii a_jj), hence

    lambda_min(A) >= c - gamma_{n+1}/(1 - gamma_{n+1}) tr(A - c I).                                            (1)

That bound trusts the library to solve triangular systems by substitution, which fast ones do not promise (some invert the
diagonal blocks). So, as in `bounds`, the factor is taken as a guess and what it fails to explain is measured. For
*any* matrix L, the exact L L^T is positive semi-definite, so by Weyl

    lambda_min(A) >= c - ||A - c I - L L^T||_F,                                                                (2)

and the norm is bounded from above by the computed residual plus its rounding error: sums of b products, added over n/b
blocks in any order, have error at most gamma_{b + n/b + 3} (|L| |L^T|)_ij <= gamma ||l_i|| ||l_j||, whose Frobenius norm is
gamma ||L||_F^2 [higham2002, ch. 3]; the additions of A and c cost gamma_2 (|a_ij| + |c|). With b = 128 and n = 10000 the
bound is below c by about 2e-14 tr(A), better than (1), for twice the work of the factorization, n^3/3, in all.

Assumed: IEEE double precision, products by the definition (not Strassen's).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["least_eigenvalue_lower_by_cholesky", "shifted_factor", "unexplained"]

_UNIT = 2.0**-53
_DEPTH = 128
_TILE = 1024
_SLACK = 1.0 + 2.0**-20  # the error terms are themselves rounded
_ATTEMPTS = 12


def least_eigenvalue_lower_by_cholesky(A: Tensor, guess: float) -> float:
    """Lower bound on lambda_min(A), near `guess` if that is near lambda_min; -inf if nothing could be proved.

    Args:
        A: (n, n) exactly symmetric, float64, its largest entry between 2^-300 and 2^300: beside it underflow does not matter.
        guess: An approximation of lambda_min(A).
    """
    margin = 4.0 * _UNIT * (float(A.diagonal().abs().sum()) + A.shape[0] * abs(guess))
    for _ in range(_ATTEMPTS):
        c = guess - margin
        L = shifted_factor(A, -c)
        if L is not None:
            return c - unexplained(A, L, c)
        margin *= 8.0
    return -math.inf


def shifted_factor(A: Tensor, shift: float) -> Tensor | None:
    """The Cholesky factor of A + shift I, or None if that is not numerically positive definite."""
    shifted = A.clone()
    shifted.diagonal().add_(shift)
    L, info = torch.linalg.cholesky_ex(shifted)
    return L if int(info) == 0 and bool(torch.isfinite(L.diagonal()).all()) else None


def unexplained(A: Tensor, L: Tensor, c: float) -> float:
    """Upper bound on ||A - c I - L L^T||_F, tile by tile of the lower triangle."""
    n, squares = A.shape[0], 0.0
    for top in range(0, n, _TILE):
        bottom = min(top + _TILE, n)
        for left in range(0, top + 1, _TILE):
            right = min(left + _TILE, n)
            residual = A[top:bottom, left:right].clone()
            if top == left:
                residual.diagonal().sub_(c)
            # The columns of L beyond `right` are zero in these rows.
            product = torch.zeros_like(residual)
            for k in range(0, right, _DEPTH):
                last = min(k + _DEPTH, right)
                product += L[top:bottom, k:last] @ L[left:right, k:last].mT
            residual -= product
            squares += (1.0 if top == left else 2.0) * float(residual.square().sum())
    depth = _DEPTH + math.ceil(n / _DEPTH) + 3
    gamma = depth * _UNIT / (1.0 - depth * _UNIT)
    product_error = gamma * float(torch.linalg.vector_norm(L)) ** 2
    entry_error = 3.0 * _UNIT * (float(torch.linalg.vector_norm(A)) + math.sqrt(n) * abs(c) + product_error / gamma)
    return _SLACK * (math.sqrt(squares) + product_error + entry_error) + math.ulp(c)
