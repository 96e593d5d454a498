r"""Bounds on singular values and eigenvalues that hold in spite of rounding.

A certificate compares a norm with a number, so it needs a norm that is not too small by even one
rounding. LAPACK promises only that its values are right up to `p(n) * eps * ||A||`, with a factor
`p(n)` that it does not state; those that can be proved grow faster than `n^2`. So nothing here
trusts the factorization. It is taken as a *guess*, and what the guess fails to explain is measured
afterwards [rump2011]. For any matrices,

    W = U S V^T + E,     ||U^T U - I|| <= d,     ||V^T V - I|| <= d,     ||E||_F <= e            (1)

gives, since the singular values of `U` and `V` lie between `sqrt(1 - d)` and `sqrt(1 + d)` and
since a perturbation of norm `e` moves a singular value by at most `e` (Weyl),

    ||W|| <= max(S) (1 + d) + e,          sigma_min(W) >= min(S) (1 - d) - e.                    (2)

For symmetric `A = Q L Q^T + E`, `x^T Q L Q^T x >= min(L) ||Q^T x||^2` and
`1 - d <= ||Q^T x||^2 <= 1 + d`, so

    lambda_min(A) >= min(L) (1 - d) - e   if min(L) >= 0,     else   min(L) (1 + d) - e.         (3)

`d` and `e` come from three matrix products in float64. A product with `k` terms per entry, summed
in *any* order with or without fused operations, has entrywise error at most `gamma_k |A| |B|`,
where `gamma_k = k u / (1 - k u)` and `u = 2^-53` (Chapter 3 of [higham2002]); summing blocks of 64
terms and then the blocks replaces `k` by `64 + k / 64`. Were the factorization wrong, or even
random, (2) and (3) would be loose but still true; where they say nothing (NaN, no convergence) the
trivial bounds `||W||_F`, `0` and `-||A||_F` are returned.

What is assumed: IEEE arithmetic rounding to nearest, and products by the definition (not
Strassen's). The relative excess is about `1e-14` for 10 rows, `1e-12` for 200 and `1e-11` for 1000.
The cost is one factorization with vectors and six products, on the CPU wherever the matrix lives
(not every device has float64).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wellposed._progress import announced
from wellposed.errors import InvalidArgument, InvalidType
from wellposed.linalg.directed import ldexp_down, ldexp_up, scaled

_UNIT = 2.0**-53
_BLOCK = 64
# Error terms are themselves computed with rounding: relative error below (number of entries) * u, so this
# factor covers matrices of up to 2^32 entries. It multiplies the error terms only: no visible loss.
_SLACK = 1.0 + 2.0**-20
# What underflow may take away, in scaling, products and sums of squares, if the largest entry is in [1/2, 1).
_UNDERFLOW = 2.0**-400


def spectral_norm_upper(W: Tensor) -> float:
    r"""Upper bound on the spectral norm `||W||_2`, never below it: (2) in this module.

    It bounds the norm of the matrix *as stored*: a float32 weight is converted to float64 exactly.

    Args:
        W: (m, k) real floating-point matrix, finite and not empty.

    Returns:
        The bound, a Python float; `inf` only if the norm itself is near the largest float64.

    Examples:
        >>> import torch, wellposed as wp
        >>> upper = wp.linalg.spectral_norm_upper(torch.tensor([[3.0, 0.0], [0.0, 4.0]]))
        >>> upper >= 4.0, upper < 4.0 + 1e-9
        (True, True)
    """
    A, exponent = scaled(_checked(W, "spectral_norm_upper", "W"))
    trivial = _SLACK * _frobenius(A)
    if trivial == 0.0:
        return 0.0
    s, defect, error = _measured_svd(A)
    # `min` keeps its first argument when the second is NaN: a broken factorization leaves the trivial bound.
    return ldexp_up(min(trivial, _up(max(s) * (1.0 + defect) + error)), exponent)


def least_singular_value_lower(Z: Tensor) -> float:
    r"""Lower bound on the least of the `min(n, m)` singular values of `Z`, by (2), or 0.

    It is absolute: off by about `1e-12 ||Z||`, so a positive value proves full rank, and 0 proves
    nothing.

    Args:
        Z: (n, m) real floating-point matrix, finite and not empty.

    Returns:
        The bound, a Python float, at least 0.

    Examples:
        >>> import torch, wellposed as wp
        >>> lower = wp.linalg.least_singular_value_lower(torch.tensor([[3.0, 0.0], [0.0, 4.0]]))
        >>> lower <= 3.0, lower > 3.0 - 1e-9
        (True, True)
    """
    A, exponent = scaled(_checked(Z, "least_singular_value_lower", "Z"))
    s, defect, error = _measured_svd(A)
    # `max` keeps its first argument when the second is NaN; 0 is the trivial bound.
    lower = max(0.0, _down(_down(min(s) * max(0.0, 1.0 - defect)) - error))
    return max(0.0, ldexp_down(lower, exponent))


def least_eigenvalue_lower(S: Tensor) -> float:
    r"""Lower bound on the least eigenvalue of a symmetric matrix: (3) in this module.

    A Gram matrix that was computed is symmetric only up to rounding. The bound is taken on
    `(S + S^T) / 2` and lowered by `||S - S^T||_F / 2`, so that it holds for the symmetric part, for
    the matrix that the lower triangle defines, and for the one that the upper triangle defines.

    Args:
        S: (n, n) real floating-point matrix, finite and not empty, symmetric up to rounding *of its
            dtype*: `max |S - S^T| <= min(100 eps sqrt(n), 1e-2) max |S|`.

    Returns:
        The bound, a Python float; off by about `1e-12 ||S||`.

    Examples:
        >>> import torch, wellposed as wp
        >>> lower = wp.linalg.least_eigenvalue_lower(torch.tensor([[2.0, 1.0], [1.0, 2.0]]))
        >>> lower <= 1.0, lower > 1.0 - 1e-9
        (True, True)
    """
    A = _checked(S, "least_eigenvalue_lower", "S")
    _check_symmetric(S, A)
    A, exponent = scaled(A)
    asymmetry = _SLACK * _frobenius(A - A.T) / 2.0
    H = (A + A.T) / 2.0
    norm = _frobenius(H)
    if norm == 0.0 and asymmetry == 0.0:
        return 0.0
    forming = 2.0 * _UNIT * norm  # one rounding per entry in A + A^T; the halving is exact
    trivial = -_SLACK * norm
    # `max` keeps its first argument when the second is NaN.
    lower = max(trivial, _down(_least_eigenvalue(H)))
    return ldexp_down(_down(lower - (asymmetry + forming + _UNDERFLOW)), exponent)


def _least_eigenvalue(H: Tensor) -> float:
    """(3) for an exactly symmetric float64 matrix; NaN if the factorization broke."""
    with announced(f"bounding the least eigenvalue of a {H.shape[0]} x {H.shape[0]} matrix", H.shape[0] ** 3):
        try:
            eigenvalues, Q = torch.linalg.eigh(H)
        except torch.linalg.LinAlgError:
            return math.nan
        least = float(eigenvalues.min())
        defect = _orthogonality_defect(Q)
        error = _unexplained(H, Q * eigenvalues, Q.T)
    factor = 1.0 - defect if least >= 0.0 else 1.0 + defect
    return _down(least * factor) - error


def _measured_svd(A: Tensor) -> tuple[list[float], float, float]:
    """Computed singular values with `d` and `e` of (1); NaN if the factorization broke."""
    with announced(f"bounding the singular values of a {A.shape[0]} x {A.shape[1]} matrix", A.numel() * min(A.shape)):
        try:
            U, s, Vh = torch.linalg.svd(A, full_matrices=False)
        except torch.linalg.LinAlgError:
            return [math.nan], math.nan, math.nan
        defect = max(_orthogonality_defect(U), _orthogonality_defect(Vh.T))
        error = _unexplained(A, U * s, Vh)
    # A guess may have any sign: U diag(s) = (U diag(sign s)) diag(|s|), whose defect is the same.
    return s.abs().tolist(), defect, error


def _orthogonality_defect(Q: Tensor) -> float:
    """Upper bound on `||Q^T Q - I||_2`."""
    P, error = _product(Q.T, Q)
    P.diagonal().sub_(1.0)
    return _SLACK * (_frobenius(P) + error) + _UNDERFLOW


def _unexplained(A: Tensor, left: Tensor, right: Tensor) -> float:
    """Upper bound on `||A - left right||_F`, where each entry of `left` may carry one rounding."""
    P, error = _product(left, right)
    return _SLACK * (_frobenius(A - P) + error) + _UNDERFLOW


def _product(A: Tensor, B: Tensor) -> tuple[Tensor, float]:
    """`A B`, and a bound on the Frobenius norm of its rounding error."""
    k = A.shape[1]
    P = A[:, :_BLOCK] @ B[:_BLOCK]
    block = torch.empty_like(P)
    for start in range(_BLOCK, k, _BLOCK):
        # Not addmm: the block's sum must be finished before it meets P, or the errors would add up k deep.
        P += torch.mm(A[:, start : start + _BLOCK], B[start : start + _BLOCK], out=block)
    # 2 more: the rounding in `left` that `_unexplained` allows, and one to spare.
    depth = min(k, _BLOCK) + math.ceil(k / _BLOCK) + 2
    gamma = depth * _UNIT / (1.0 - depth * _UNIT)
    return P, gamma * _SLACK * _frobenius(A.abs() @ B.abs())


def _frobenius(A: Tensor) -> float:
    return float(torch.linalg.vector_norm(A))


def _up(x: float) -> float:
    """Above the exact value of a few operations without cancellation, computed as `x`."""
    return x + abs(x) * 2.0**-49


def _down(x: float) -> float:
    """Below the exact value of a few operations without cancellation, computed as `x`."""
    return x - abs(x) * 2.0**-49


def _checked(W: Tensor, function: str, name: str) -> Tensor:
    """`W` in float64 on the CPU, or an error that says what to do."""
    if not isinstance(W, Tensor):
        raise InvalidType(f"{function}: {name} must be a torch.Tensor, got {type(W).__name__}. Use torch.as_tensor.")
    if W.ndim != 2:
        raise InvalidArgument(
            f"{function}: {name} must be a matrix (2 dimensions), got shape {tuple(W.shape)}. Reshape it, "
            "or call once per matrix of a batch."
        )
    if W.numel() == 0:
        raise InvalidArgument(f"{function}: {name} must have at least one row and one column, got shape {tuple(W.shape)}.")
    if not W.is_floating_point():
        raise InvalidArgument(
            f"{function}: {name} must be real with a floating-point dtype, got {W.dtype}. Convert integers "
            f"with {name}.double(); complex matrices are not supported."
        )
    A = W.detach().to(device="cpu", dtype=torch.float64)
    if not torch.isfinite(A).all():
        count = int((~torch.isfinite(A)).sum())
        raise InvalidArgument(
            f"{function}: {name} must be finite, got {count} of {A.numel()} entries that are NaN or "
            "infinite. Look for the step that produced them; no bound exists for this matrix."
        )
    return A


def _check_symmetric(S: Tensor, A: Tensor) -> None:
    n, columns = A.shape
    if n != columns:
        raise InvalidArgument(
            f"least_eigenvalue_lower: S must be square, got shape {tuple(A.shape)}. For the singular values "
            "of a rectangular matrix use least_singular_value_lower."
        )
    # Half the entries first: the difference of two large entries may overflow.
    asymmetry = float((A / 2.0 - A.T / 2.0).abs().max()) * 2.0
    largest = float(A.abs().max())
    tolerance = min(100.0 * torch.finfo(S.dtype).eps * math.sqrt(n), 1e-2)
    if asymmetry > tolerance * largest:
        raise InvalidArgument(
            "least_eigenvalue_lower: S must be symmetric up to rounding, got max|S - S^T| = "
            f"{asymmetry:.3g} with max|S| = {largest:.3g} (allowed: {tolerance:.3g} of it for {S.dtype}). "
            "Pass the symmetric part (S + S.T) / 2 if that is the matrix you mean."
        )
