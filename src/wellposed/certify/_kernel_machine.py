r"""The kernel machine k(., X) alpha with H alpha near r: upper bounds of its norm and of what it
misses, in spite of rounding.

Any vector alpha is a machine. Its norm is sqrt(alpha^T H alpha), and at the samples it misses r by
s = r - H alpha. For the computed alpha both are evaluated, and their rounding is bounded (Chapter 3
of [higham2002]). Where H >= l > 0 is proved, the exact machine H^(-1) r misses nothing, and because
r = H alpha + s its norm satisfies

    r^T H^(-1) r = alpha^T r + alpha^T s + s^T H^(-1) s <= alpha^T (r + s) + |s|^2/l.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.errors import InvalidArgument
from wellposed.linalg import least_eigenvalue_lower
from wellposed.linalg.directed import ROUNDING, down, exponent_of, ldexp, ldexp_up, scaled, up, vector_norm_upper


@dataclass(frozen=True)
class MachineBounds:
    """What is known of it.

    Attributes:
        norm: Upper bound of its norm.
        missed: Upper bound of the mean of |s|; 0 if it is the exact machine of a regular H.
        eigenvalues: (n,) of H, descending. projections: (n,) of r. contributions: (n,) their parts
            of the squared norm.
        kept: (n,) bool, which eigenvalues were not taken for 0.
    """

    norm: float
    missed: float
    eigenvalues: Tensor
    projections: Tensor
    contributions: Tensor
    kept: Tensor


def kernel_machine(H: Tensor, r: Tensor, rtol: float) -> MachineBounds:
    """The machine that ignores eigenvalues below rtol times the largest.

    Args:
        H: (n, n), finite. r: (n,), finite. Both are measured in powers of two, so that nothing
            overflows or vanishes.
        rtol: In [0, 1).
    """
    h = exponent_of(H)
    h += h % 2  # even: the norm takes its square root
    H = ldexp(H, -h)
    H, (r, e) = (H + H.t()) / 2, scaled(r)
    try:
        eigenvalues, Q = torch.linalg.eigh(H)
    except torch.linalg.LinAlgError as error:
        raise InvalidArgument(
            "generalization_bound: the eigenvalues of the kernel were not found. Rescale the inputs or the parameters."
        ) from error
    eigenvalues, Q = eigenvalues.flip(0), Q.flip(1)
    projections = Q.t() @ r
    kept = (eigenvalues > rtol * eigenvalues[0].clamp(min=0.0)) & (eigenvalues > 0)
    quotients = torch.where(kept, projections / eigenvalues.where(kept, torch.ones_like(eigenvalues)), 0.0)
    square, missed = _bounds(H, r, Q @ quotients, regular=bool(kept.all()))
    contributions = ldexp(projections * quotients, 2 * e - h)
    norm = ldexp_up(up(math.sqrt(square)), e - h // 2) if square > 0 else 0.0
    missed = ldexp_up(missed, e) if missed > 0 else 0.0
    return MachineBounds(norm, missed, ldexp(eigenvalues, h), ldexp(projections, e), contributions, kept)


def _bounds(H: Tensor, r: Tensor, alpha: Tensor, *, regular: bool) -> tuple[float, float]:
    """Upper bounds of the squared norm and of the mean of |s|."""
    n = len(r)
    gamma, a = 2 * (n + 4) * ROUNDING, alpha.abs()
    s = r - H @ alpha
    wrong = gamma * (H.abs() @ a + r.abs())  # of each entry of s
    least = down(least_eigenvalue_lower(H)) if regular else 0.0
    sign = 1.0 if least > 0 else -1.0
    product = float(alpha @ (r + sign * s)) + (1 + gamma) * float(a @ (wrong + gamma * (r.abs() + s.abs())))
    if least > 0:
        return max(0.0, up(product + up(vector_norm_upper(s.abs() + wrong) ** 2 / least))), 0.0
    if not bool(alpha.any()):
        return 0.0, up((1 + gamma) * float(r.abs().mean()))
    return max(0.0, up(product)), up((1 + gamma) * float((s.abs() + wrong).mean()))
