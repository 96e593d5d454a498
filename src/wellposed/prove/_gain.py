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
from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.prove.error_free import SLACK, gamma

_CELLS = 4000
#: `tight_gain` is at most this part below the least quotient; pieces of a cell and rounds that it may take.
_GAP, _PIECES, _ROUNDS = 1e-7, 16, 12


@dataclass(frozen=True)
class Gain:
    """The constants of the theorem, and gain(x)/(x + f)."""

    eta: float
    s: float
    L: float
    f: float
    e0: float
    g: float
    g0: float

    def edges(self) -> Tensor:
        """From s to L: x^2 - s^2 is a geometric sequence, as h grows by its root."""
        span = max(self.L**2 - self.s**2, 1e-12 * self.s**2) * SLACK
        first = math.log10(1e-6 * min(self.s**2, span))
        squares = torch.logspace(first, math.log10(span), _CELLS, dtype=torch.float64)
        squares[-1] = span * SLACK
        return torch.cat([torch.full((1,), self.s, dtype=torch.float64), (self.s**2 + squares).sqrt()])

    def lower(self, low: Tensor, high: Tensor) -> Tensor:
        """Lower bounds of the quotient on the cells from low to high."""
        eta, s, L, f, g, g0 = self.eta, self.s, self.L, self.f, self.g, self.g0
        low, high = low / SLACK, high * SLACK
        t = eta * L * L
        A1, A2 = 1 - t / 2 - eta * s * s / 2, t * s * s / 2
        h = ((s * s + L * L) * (high.square() - s * s) + s**4).clamp(min=0.0).sqrt()
        E = f * high + self.e0
        grow = A1 * (low if A1 >= 0 else high).square() + A2
        pull = (g * high.square() + g0).clamp(max=f * f)
        pulled = torch.where(pull < f * f, g * high.square() + abs(g0), f * f)  # what its rounding is relative to
        fall = eta * h * E + eta / 2 * E.square()
        gain = grow - pull - fall - (grow.abs() + abs(A2) + t * high.square() + pulled + fall) * (SLACK - 1)
        least = gain / torch.where(gain > 0, high + f, low + f)
        return least - least.abs() * (SLACK - 1)


def least_gain(eta: float, s: float, L: float, f: float, e0: float, g: float = 0.0, g0: float = math.inf) -> float:
    """kappa: a lower bound of gain(x)/(x + f) over [s, L], cell by cell of a grid."""
    if not 0 < s <= L or not math.isfinite(L + f + e0):
        return -math.inf
    gain = Gain(eta, s, L, f, e0, g, g0)
    x = gain.edges()
    return float(gain.lower(x[:-1], x[1:]).min())


def tight_gain(eta: float, s: float, L: float, f: float, e0: float, g: float, g0: float) -> float:
    """The same, within 1e-7 of the least quotient where float64 numbers allow it: cells that may
    have it are divided."""
    gain = Gain(eta, s, L, f, e0, g, g0)
    x = gain.edges()
    low, high, done = x[:-1], x[1:], math.inf
    parts = torch.linspace(0.0, 1.0, _PIECES + 1, dtype=torch.float64)
    for _ in range(_ROUNDS):
        bounds, least = gain.lower(low, high), float(gain.lower(high, high).min())
        open_ = bounds < least - _GAP * abs(least)
        done = min(done, float(bounds[~open_].min()) if bool((~open_).any()) else math.inf)
        if not bool(open_.any()):
            return done
        x = low[open_].unsqueeze(1) + (high - low)[open_].unsqueeze(1) * parts
        x[:, -1] = high[open_]
        low, high = x[:, :-1].flatten(), x[:, 1:].flatten()
    return min(done, float(gain.lower(low, high).min()))


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
