"""The spectral radius of a nonnegative matrix, from both sides."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wellposed.certify._directed import down, up

__all__ = ["radius_bounds"]

_UNIT = 2.0**-53
_ROUNDS = 60


def radius_bounds(M: Tensor) -> tuple[float, float]:
    r"""Lower and upper bounds of rho(M) for M >= 0, by vectors d > 0 (Collatz-Wielandt):

        min_i (M d)_i/d_i <= rho(M) <= max_i (M d)_i/d_i

    Any positive d gives true bounds; good ones come from d = (t I - M)^(-1) 1 with t just above rho(M), for which (M d)_i/d_i
    = t - 1/d_i < t. Bisection finds a small t for which d is positive. This works for reducible and nilpotent M too, where
    power iteration has no positive limit.

    Args:
        M: (m, m), nonnegative, finite, float64.
    """
    m = M.shape[0]
    ones = torch.ones(m, dtype=M.dtype)
    high = float(M.sum(dim=1).max())
    lower, upper = _quotients(M, ones)
    if high == 0.0:
        return 0.0, upper
    low = 0.0
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        d = _resolvent(M, middle)
        if d is None:
            low = middle
            continue
        high = middle
        below, above = _quotients(M, d)
        lower, upper = max(lower, below), min(upper, above)
        if high - low <= 1e-6 * high:
            break
    return lower, upper


def _resolvent(M: Tensor, t: float) -> Tensor | None:
    """(t I - M)^(-1) 1, scaled, if it is positive: for t <= rho(M) it is not."""
    eye = torch.eye(M.shape[0], dtype=M.dtype)
    d, info = torch.linalg.solve_ex(t * eye - M, torch.ones(M.shape[0], 1, dtype=M.dtype))
    d = d.squeeze(1)
    if int(info) != 0 or not bool(torch.isfinite(d).all()) or bool((d <= 0).any()):
        return None
    return d / d.max()


def _quotients(M: Tensor, d: Tensor) -> tuple[float, float]:
    """Bounds of (M d)_i/d_i over i; sums of nonnegative terms are right to a relative gamma_m."""
    m = M.shape[0]
    gamma = 2 * (m + 4) * _UNIT
    if bool((d < 1e-290).any()):
        return 0.0, math.inf  # too near to underflow for a relative error bound
    quotients = (M @ d) / d
    # underflow takes away, or adds, less than m 2^-1074/1e-290
    lower = max(0.0, down(float(quotients.min()) * (1 - gamma) - 1e-30))
    return lower, up(float(quotients.max()) * (1 + gamma) + 1e-30)
