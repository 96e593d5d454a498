"""Conjugate gradients, every row by itself."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["conjugate_gradients"]

_MOST_STEPS = 1000


def conjugate_gradients(
    apply: Callable[[Tensor], Tensor],
    transposed: Callable[[Tensor], Tensor] | None,
    b: Tensor,
    *,
    rtol: float,
) -> Tensor:
    r"""Solves M x = b for a positive definite M, or for any invertible M through M^T M x = M^T b (CGNR) [saad2003, 8.3].

        q = M d,  a = |r|^2/<d, q>  or  |s|^2/|q|^2 with s = M^T r,   x += a d,   d = (r or s) + beta d

    Ends for a row when |b - M x| <= rtol |b| or when it can get no smaller; finished rows stand still.

    Args:
        apply, transposed: M and M^T on (batch, n); None says that M is symmetric positive definite.
        b: (batch, n).
        rtol: Relative tolerance.
    """
    x = torch.zeros_like(b)
    r = b.clone()
    s = r if transposed is None else transposed(r)
    d = s.clone()
    square = torch.linalg.vecdot(s, s)
    target = rtol * torch.linalg.vector_norm(b, dim=1)
    best = torch.linalg.vector_norm(r, dim=1)
    stalled = torch.zeros_like(best)
    for _ in range(_MOST_STEPS):
        active = (torch.linalg.vector_norm(r, dim=1) > target) & (square > 0) & (stalled < 5)
        if not bool(active.any()):
            break
        q = apply(d)
        curvature = torch.linalg.vecdot(d, q) if transposed is None else torch.linalg.vecdot(q, q)
        a = torch.where(active, square / curvature, 0.0).unsqueeze(1)
        x = x + a * d
        r = r - a * q
        s = r if transposed is None else transposed(r)
        following = torch.linalg.vecdot(s, s)
        d = s + torch.where(active, following / square, 0.0).unsqueeze(1) * d
        square = following
        size = torch.linalg.vector_norm(r, dim=1)
        stalled = torch.where(size < 0.9 * best, 0.0, stalled + 1)  # rounding has been reached
        best = torch.minimum(best, size)
    return x
