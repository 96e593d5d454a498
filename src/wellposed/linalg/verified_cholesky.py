r"""A lower bound on the least eigenvalue by a Cholesky factorization that is checked afterwards.

If a floating-point Cholesky factorization of A - c I runs to completion, A is nearly at least c
[rump2006]: the computed factor satisfies L L^T = A - c I + D with |D_ij| <= gamma_{n+1}/(1 -
gamma_{n+1}) sqrt(a_ii a_jj), hence

    lambda_min(A) >= c - gamma_{n+1}/(1 - gamma_{n+1}) tr(A - c I).                              (1)

That bound trusts the library to solve triangular systems by substitution, which fast ones do not
promise (some invert the diagonal blocks). So, as in `bounds`, the factor is taken as a guess and
what it fails to explain is measured. For *any* matrix L, the exact L L^T is positive semi-definite,
so by Weyl

    lambda_min(A) >= c - ||A - c I - L L^T||_F,                                                  (2)

and the norm is bounded from above by the computed residual plus its rounding error: sums of b
products, added over n/b blocks in any order, have error at most gamma_{b + n/b + 3} (|L| |L^T|)_ij
<= gamma ||l_i|| ||l_j||, whose Frobenius norm is gamma ||L||_F^2 [higham2002, ch. 3]; the additions
of A and c cost gamma_2 (|a_ij| + |c|). With b = 128 and n = 10000 the bound is below c by about
2e-14 tr(A), better than (1), for twice the work of the factorization, n^3/3, in all.

Assumed: IEEE double precision, products by the definition (not Strassen's).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wellposed._progress import announced
from wellposed.linalg.bounds import spectral_norm_upper

_UNIT = 2.0**-53
_DEPTH = 128
_TILE = 256  # of the lower triangle: what is above the diagonal of a tile is computed in vain
_SLACK = 1.0 + 2.0**-20  # the error terms are themselves rounded
_ATTEMPTS = 12
# Bounds of norms below it: products that underflow could hide a part of |W|^2, m k 2^-1074 against u bound^2.
_LEAST = 2.0**-400
# Of the power iteration that guesses a norm; the least guess beside the norm of the whole matrix, or beside its largest entry.
_POWER_STEPS = 24
_FLOOR, _LEAST_GUESS = 2.0**-6, 2.0**-10


def least_eigenvalue_lower_by_cholesky(A: Tensor, guess: float) -> float:
    """Lower bound on lambda_min(A), near a good `guess`; -inf if nothing could be proved.

    Args:
        A: (n, n) exactly symmetric, float64, its largest entry between 2^-300 and 2^300: beside it
            underflow does not matter.
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


def norm_is_below(W: Tensor, bound: float) -> bool:
    r"""Whether |W| <= bound is proved; False proves nothing.

    `|W| <= t` is the same as `t^2 I - W^T W >= 0`: the lower bound (2) of that matrix must cover
    the rounding of forming it. Two products and a factorization of a third of the flops of one
    replace a singular value decomposition of about twenty.

    Args:
        W: (m, k) floating point; other dtypes are converted to float64, which is exact.
        bound: What the norm is compared with. Nothing is proved for one that is not positive, nor
            for one so small or so large that its square leaves the range of float64.
    """
    with announced(f"testing the norm of a {W.shape[0]} x {W.shape[1]} matrix", W.numel() * min(W.shape)):
        return _norm_is_below(W, bound)


def _norm_is_below(W: Tensor, bound: float) -> bool:
    W = W if W.shape[0] >= W.shape[1] else W.t()
    m, k = W.shape
    if k == 0:
        return bound >= 0
    if not _LEAST < bound < 1 / _LEAST:
        return False
    # by a power of 2 the bound comes near 1, and underflow costs no more than 2^-1074 an entry
    scale = 2.0 ** -math.frexp(bound)[1]
    W, square = W.detach().double() * scale, (bound * scale) ** 2 * (1.0 - 4 * _UNIT)
    G = W.t() @ W
    # |fl(W^T W) - W^T W|_F <= gamma_m |W|_F^2, which is the trace of G up to rounding; twice, for what is of second order
    forming = 2 * ((m + 4) * _UNIT * float(G.diagonal().sum()) + 4 * _UNIT * square)
    A = torch.add(G, G.t()).mul_(-0.5)
    A.diagonal().add_(square)
    c = 2 * forming + 2 * (k + 150) * _UNIT * k * square  # more than the check mostly takes off
    L = shifted_factor(A, -c)
    return L is not None and c - unexplained(A, L, c) >= forming


def norm_upper_by_test(W: Tensor) -> float:
    """Upper bound of |W| within about 1e-8: eigenvalues of W^T W, proved by `norm_is_below`.

    Three times faster than `spectral_norm_upper` at 1000 units, which is the fallback and is
    sharper.

    Args:
        W: (m, k) finite.
    """
    A = W.detach().double()
    A = A if A.shape[0] >= A.shape[1] else A.t()
    with announced(f"bounding the norm of a {W.shape[0]} x {W.shape[1]} matrix", A.numel() * A.shape[1]):
        try:
            guess = math.sqrt(max(0.0, float(torch.linalg.eigvalsh(A.t() @ A)[-1])))
        except torch.linalg.LinAlgError:
            return spectral_norm_upper(W)
        bound = guess * (1.0 + 1e-8)
        return bound if bound > 0.0 and _norm_is_below(A, bound) else spectral_norm_upper(W)


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
        while bound < whole and not _norm_is_below(part, bound):
            bound, growth = min(whole, bound * growth), growth**2
        if bound >= whole:
            return whole
    return bound


def symmetric_part_upper(A: Tensor) -> float:
    """Upper bound of lambda_max((A + A^T)/2), within about 1e-9 of |A|.

    Args:
        A: (m, m) finite float64.
    """
    if not _in_range(A):
        return spectral_norm_upper(A)
    S = torch.add(A, A.t()).mul_(-0.5)
    guess = float(torch.linalg.eigvalsh(S)[0])
    return _SLACK * _forming(A) - least_eigenvalue_lower_by_cholesky(S, guess - 1e-9 * abs(guess))


def restricted_symmetric_part_upper(R: Tensor, possible: Tensor) -> float:
    """Upper bound of max_i lambda_max((R + R^T)/2 on S_i), within about one per cent; 0 if that is
    negative.

    The eigenvalues of the largest set guess it, and one checked factorization per sample proves it,
    or raises the guess. Never above that of the whole matrix, up to rounding, because eigenvalues
    of principal parts interlace.

    Args:
        R: (m, m) finite float64.
        possible: (n, m) bool, the sets S_i.
    """
    if not _in_range(R):
        return spectral_norm_upper(R)
    S = torch.add(R, R.t()).mul_(-0.5)
    bound, guess = 0.0, -math.inf
    for i in torch.argsort(possible.sum(dim=1), descending=True).tolist():
        index = possible[i].nonzero().squeeze(1)
        part = S[index][:, index].contiguous()
        L = shifted_factor(part, guess) if math.isfinite(guess) else None
        if L is None and len(index):
            top = max(0.0, -float(torch.linalg.eigvalsh(part)[0]))
            guess = 1.01 * top + _LEAST_GUESS * float(S.abs().max())
            L = shifted_factor(part, guess)
        if L is not None:
            bound = max(bound, guess + unexplained(part, L, -guess))
        elif len(index):
            return symmetric_part_upper(R)
    return bound + _SLACK * _forming(R)


def _in_range(A: Tensor) -> bool:
    """Whether underflow and overflow do not matter beside the largest entry."""
    return 2.0**-300 < float(A.abs().max()) < 2.0**300 if A.numel() else False


def _forming(A: Tensor) -> float:
    """Bound of what the rounding of A + A^T changes, in the Frobenius norm."""
    return 2 * _UNIT * float(torch.linalg.vector_norm(A))
