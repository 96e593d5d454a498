r"""How much a recurrent matrix can amplify: bounds of |(I - D R)^-1 D| for diagonal slopes D.

If x = D (R x + b) with slopes in [0, 1], then x . (R x + b) >= |x|^2, hence

    |x| <= |b|/(1 - omega),      omega = lambda_max((R + R^T)/2).                                (1)

If moreover D <= E entry by entry, omega may be replaced by max(0, lambda_max(sym E^1/2 R E^1/2)),
because D^1/2 x = E^1/2 y with |y| <= |x|. One factorization for E thus serves as long as the slopes
stay below it and R moves little: |omega - omega'| <= |R - R'|_F.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wellposed.linalg.verified_cholesky import (
    least_eigenvalue_lower_by_cholesky,
    norm_upper_by_test,
    symmetric_part_upper,
)
from wellposed.prove._explicit import Explicit
from wellposed.prove._problem import Exact
from wellposed.prove._resolvent import Resolvents
from wellposed.prove._slopes import AbstractSlopes
from wellposed.prove.error_free import SLACK, UNIT, norm_up

#: How far R may move before its reference is renewed, and the same for wide networks: omega is at most twice this above
#: the eigenvalue, and `verify` holds it to that.
_DRIFT, _DRIFT_WIDE, _WIDE = 0.01, 0.06, 800
#: Added to smooth slopes of a reference, so that small ones do not leave it soon.
_ROOM = 0.05
#: How many times the reference slopes may become before the reference is renewed.
_EXCESS = 1.15
#: How much row weights may add to the square of a norm before their reference is renewed.
_BEYOND = 0.3


def _proved(S: Tensor, guess: float, A: Tensor) -> float:
    """Upper bound of lambda_max(-S) near -guess; one rounding per entry of A + A^T is added."""
    return (-least_eigenvalue_lower_by_cholesky(S, guess)) + 4 * UNIT * norm_up(A) + 1e-300


class Contraction:
    """omega and |R| along a descent, from a reference R_0 that is renewed now and then.

    Attributes:
        omega: >= lambda_max(sym R). R_norm: >= |R|. tau: 1/(1 - omega), infinite if omega >= 1.
        resolvents: What is proved of single samples, for smooth slopes. explicit: T_i, for ReLU.
    """

    def __init__(self, slopes: AbstractSlopes) -> None:
        self._slopes = slopes
        self.resolvents, self.explicit = Resolvents(), Explicit()
        self._reference: Tensor | None = None
        self._above: Tensor | None = None
        self._weights: Tensor | None = None
        self.omega = self.R_norm = self.tau = self._weighted = math.inf

    def update(self, R: Exact) -> None:
        """Bounds for this R."""
        low = norm_up(R.low)
        drift = math.inf if self._reference is None else norm_up(R.high - self._reference) + low
        if drift > (_DRIFT if R.high.shape[0] < _WIDE else _DRIFT_WIDE):
            self._reference, self._above, self._weights = R.high, None, None
            self._omega0, self._norm0 = symmetric_part_upper(R.high), norm_upper_by_test(R.high)
            drift = low
        self._drift = drift * SLACK
        self.omega = self._omega0 + self._drift
        self.R_norm = (self._norm0 + self._drift) * SLACK
        self.tau = SLACK / (1 - self.omega) if self.omega < 1 else math.inf

    def tau_of_slopes(self, V: Tensor, D: Tensor, error: float, change: float, *, renew: bool = True) -> float:
        """Upper bound of max_i |(I - D_i R)^-1 D_i| and, for smooth slopes, |D_i^1/2 (I - R
        D_i)^-1|.

        Args:
            V, D: (n, m) pre-activations and their slopes.
            error: How much larger the slopes may be.
            change: How much R may change, in norm.
            renew: Whether a reference that these slopes exceed may be renewed: one factorization
                per sample.
        """
        upper = (D + error).clamp(max=1.0)
        if self._above is None or (renew and self._excess(upper) > _EXCESS):
            near = (self._slopes.slopes_above(V) + (_ROOM if self._slopes.smooth else 0.0)).clamp(max=1.0)
            self._above = torch.maximum(near, upper)
            self._omega_above = self._largest()
        # slopes below q E have q times the eigenvalue of E
        omega = max(1.0, self._excess(upper)) * (self._omega_above + 1e-300) * SLACK + self._drift + change
        general = self.omega + change
        return SLACK / (1 - min(omega, general)) if min(omega, general) < 1 else math.inf

    def row_weighted_norm(self, squares: Tensor, *, renew: bool) -> float:
        r"""Upper bound of |diag(s) R|, given (m,) squares >= s^2.

        From a reference t: |diag(s) R|^2 <= |diag(t) R|^2 + max(s^2 - t^2) |R|^2.
        """
        assert self._reference is not None
        beyond = 0.0 if self._weights is None else max(0.0, float((squares - self._weights).max())) * self._norm0**2
        if self._weights is None or (renew and beyond > _BEYOND * self._weighted**2):
            self._weights, beyond = squares * (1 + _BEYOND / 4), 0.0
            self._weighted = norm_upper_by_test(self._weights.sqrt().unsqueeze(1) * self._reference) * SLACK
        return (math.sqrt(self._weighted**2 + beyond) + math.sqrt(float(squares.max())) * self._drift) * SLACK

    def _excess(self, upper: Tensor) -> float:
        """The least q with upper <= q E."""
        assert self._above is not None
        return float(torch.where(upper > 0, upper / self._above, 0.0).max()) * SLACK

    def _largest(self) -> float:
        """max(0, lambda_max(sym E^1/2 R E^1/2)) over the samples, from above."""
        assert self._reference is not None and self._above is not None
        largest, guess = 0.0, 0.0
        for E in self._above:
            index = E.nonzero().squeeze(1)
            root = E[index].sqrt()
            A = self._reference[index][:, index] * (root.unsqueeze(1) * root)
            S = (A + A.T) / -2
            if not bool(A.any()):
                continue
            if guess == 0 or int(torch.linalg.cholesky_ex(S + guess * torch.eye(len(index), dtype=S.dtype)).info):
                guess = -float(torch.linalg.eigvalsh(S)[0]) * 1.03
            # three roundings for the roots and products, relative to each entry
            largest = max(largest, _proved(S, -guess, A) + 8 * UNIT * norm_up(A))
        return largest
