r"""How much a step of descent gains although units switch: the inequality behind Theorem B.

A step is r' = r - eta S J^T r, where J is the Jacobian at its start and S its secant. With N = (S +
J)/2 and F = (S - J)/2,

    S J^T = N N^T + (F N^T - N F^T) - F F^T = N N^T + F N^T - S F^T,

whose bracket is skew: r does not feel it at first order. Suppose that in the ball of radius R about
the exact iterate K all N have singular values in [s, L], |F| <= f, |S F^T| <= e0 and |F^T r|^2 <= g
|N^T r|^2 + g0 |r|^2. Let x = |N^T r|/|r|. As lambda^2 <= (s^2 + L^2) lambda - s^2 L^2 on [s^2, L^2],

    |(I - eta N N^T) r|^2 <= |r|^2 (1 - 2 eta (A1 x^2 + A2)),  |N N^T r| <= h |r|,
    A1 = 1 - eta (s^2 + L^2)/2,   A2 = eta s^2 L^2/2,   h^2 = (s^2 + L^2)(x^2 - s^2) + s^4,

and therefore, with E = f x + e0,

    |r'| <= |r| (1 - eta gain(x)),    gain = A1 x^2 + A2 - min(f^2, g x^2 + g0) - eta h E - eta E^2/2.

A step is at most eta (x + f) |r| long. If gain >= kappa (x + f) for all x in [s, L] with kappa > 0,
and kappa eta (L + f) <= 1, R >= |r_K|/kappa, then |r| falls by kappa times the length of every
step, so the path is at most |r_K|/kappa long, the ball is never left, and |r| falls by the factor 1
- eta kappa (s + f) a step. Before the end of a step is known to be in the ball, |J| <= L bounds its
length: S = J is one of the pairs, with F = 0 and N = J.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wellposed.prove.error_free import SLACK, gamma

_CELLS = 4000


def least_gain(eta: float, s: float, L: float, f: float, e0: float, g: float = 0.0, g0: float = math.inf) -> float:
    """kappa: a lower bound of gain(x)/(x + f) over [s, L], cell by cell of a grid."""
    if not 0 < s <= L or not math.isfinite(L + f + e0):
        return -math.inf
    span = max(L * L - s * s, 1e-12 * s * s) * SLACK
    squares = torch.cat(
        [
            torch.zeros(1, dtype=torch.float64),
            torch.logspace(math.log10(1e-6 * min(s * s, span)), math.log10(span), _CELLS, dtype=torch.float64),
        ]
    )
    squares[-1] = span * SLACK
    x = (s * s + squares).sqrt()
    low, high = x[:-1] / SLACK, x[1:] * SLACK
    t = eta * L * L
    A1, A2 = 1 - t / 2 - eta * s * s / 2, t * s * s / 2
    h = ((s * s + L * L) * (high.square() - s * s) + s**4).clamp(min=0.0).sqrt()
    E = f * high + e0
    grow = A1 * (low if A1 >= 0 else high).square() + A2
    pull = (g * high.square() + g0).clamp(max=f * f)
    pulled = torch.where(pull < f * f, g * high.square() + abs(g0), f * f)  # what its rounding is relative to
    fall = eta * h * E + eta / 2 * E.square()
    gain = grow - pull - fall - (grow.abs() + abs(A2) + t * high.square() + pulled + fall) * (SLACK - 1)
    least = float((gain / torch.where(gain > 0, high + f, low + f)).min())
    return least - abs(least) * (SLACK - 1)


def nonnegative_norm(A: Tensor) -> float:
    """Upper bound of |A| for a matrix with entries >= 0: max_i (A^T A x)_i/x_i for a positive x
    (Collatz)."""
    x = torch.ones(A.shape[1], dtype=torch.float64)
    best = math.inf
    for _ in range(30):
        y = A.T @ (A @ x)
        best = min(best, float((y / x).max()))
        x = y / float(y.max()) + 1e-6 if float(y.max()) > 0 else x
    return math.sqrt(best) * (SLACK + gamma(A.shape[0] + A.shape[1]))
