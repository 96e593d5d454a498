"""Conjugate gradients, every row by itself."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

#: Steps in all; on the normal equations enough for condition numbers of some hundreds, whatever the
#: right-hand side.
MOST_STEPS = 20_000
#: Rounds of refinement; each must halve the measured residual, so that few are ever used.
MOST_ROUNDS = 20


def conjugate_gradients(
    apply: Callable[[Tensor], Tensor], transposed: Callable[[Tensor], Tensor] | None, b: Tensor, *, rtol: float, floor: float
) -> tuple[Tensor, Tensor]:
    r"""Solves M x = b for positive definite M, or through M^T M x = M^T b (CGNR) [saad2003, 8.3].

        q = M d, a = |r|^2/<d, q> or |s|^2/|q|^2 with s = M^T r, x += a d, d = (r or s) + beta d

    The residual r of this recurrence keeps falling below the rounding of b - M x, so it ends the
    steps and never decides: the true residual is measured, and solved for again, until it is at
    most rtol |b|, or no longer halves. The norm |M| is taken from below, from the products seen.

    Args:
        apply, transposed: M and M^T on (batch, n); None if M is symmetric positive definite.
        b: (batch, n).
        rtol: Relative tolerance; may be below what rounding allows.
        floor: What the rounding of a product may leave.

    Returns:
        (batch, n) x, and (batch,) bool: whether |b - M x| <= floor (|b| + |M| |x|) was measured.
        Finished rows stand still.
    """
    scale = b.abs().amax(dim=1, keepdim=True)  # squares of what is tiny or huge would leave the dtype
    b = b / torch.where(scale > 0, scale, 1.0)
    size = torch.linalg.vector_norm(b, dim=1)
    target = rtol * size
    x, r = torch.zeros_like(b), b
    left = size
    norm = torch.zeros_like(size)  # a lower bound of |M|
    active = size > 0
    steps = 0
    for _ in range(MOST_ROUNDS):
        if steps >= MOST_STEPS or not bool(active.any()):
            break
        d, norm, taken = _round(apply, transposed, r, target, norm, active, MOST_STEPS - steps)
        steps += taken
        remains = b - apply(x + d)
        measured = torch.linalg.vector_norm(remains, dim=1)
        better = active & (measured < left)
        x = torch.where(better.unsqueeze(1), x + d, x)
        r = torch.where(better.unsqueeze(1), remains, r)
        halved = measured <= 0.5 * left
        left = torch.where(better, measured, left)
        active = active & halved & (left > target)
    solved = left <= floor * (size + norm * torch.linalg.vector_norm(x, dim=1))
    return x * scale, solved


def _round(
    apply: Callable[[Tensor], Tensor],
    transposed: Callable[[Tensor], Tensor] | None,
    r: Tensor,
    target: Tensor,
    norm: Tensor,
    active: Tensor,
    most: int,
) -> tuple[Tensor, Tensor, int]:
    """The correction for the residual r, a lower bound of |M|, and the steps taken."""
    x = torch.zeros_like(r)
    s = r if transposed is None else transposed(r)
    d = s
    square = torch.linalg.vecdot(s, s)
    for count in range(most):
        active = active & (torch.linalg.vector_norm(r, dim=1) > target) & (square > 0)
        if not bool(active.any()):
            return x, norm, count
        q = apply(d)
        q_square, d_square = torch.linalg.vecdot(q, q), torch.linalg.vecdot(d, d)
        curvature = torch.linalg.vecdot(d, q) if transposed is None else q_square
        norm = torch.where(active, torch.maximum(norm, (q_square / d_square).sqrt()), norm)
        a = torch.where(active, square / curvature, 0.0).unsqueeze(1)
        x = x + a * d
        r = r - a * q
        s = r if transposed is None else transposed(r)
        following = torch.linalg.vecdot(s, s)
        d = s + torch.where(active, following / square, 0.0).unsqueeze(1) * d
        square = following
    return x, norm, most
