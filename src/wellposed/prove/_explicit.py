r"""Explicit resolvents of ReLU networks, kept along a descent by updates of rank one.

T_i = (I - D_i R)^-1 D_i changes slowly with R, and with the mask of its sample. For any matrix X
and E = (I - D R0) X - D,

    X - T(R) = (I - D R)^-1 (E - D (R - R0) X),
    |X - T(R)| <= (K |E| + tau^2 |R - R0|)/(1 - tau |R - R0|),     K >= |(I - D R)^-1|.            (1)

If the mask of unit u changes, D' = D + s e_u e_u^T, then X' = X + a b^T with a near s (I - D'
R0)^-1 e_u and b near (I + R0 X)^T e_u. Whatever a and b are, with g = s e_u - (I - D' R0) a,

    E' = E + s e_u (b - (I + R0 X)^T e_u)^T - g b^T,                                                (2)

so that the errors of updates add up; they are measured, in float64. X itself is stored in float32,
and sums of X_i are made in it: what that loses is known beforehand.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wellposed.linalg.verified_cholesky import shifted_factor, unexplained
from wellposed.prove._problem import Exact
from wellposed.prove.error_free import SLACK, gamma, norm_up

_UNIT32 = 2.0**-24
#: How far R may move before all are renewed; the error, and how many units may change at once, before one is.
_DRIFT, _MOST_ERROR, _MOST_UPDATES = 0.015, 1e-3, 12
#: Most numbers that are stored.
MOST_NUMBERS = 150_000_000
#: What a guess of a norm is raised by before its test, and after a test that fails.
_FIRST, _RAISED, _TESTS = 1.01, 1.02, 12
_POWER_STEPS = 30


def _gamma32(terms: int) -> float:
    """As `gamma`, of float32."""
    return 1.01 * (terms + 8) * _UNIT32


class Explicit:
    """X_i of every sample, at the masks D and near R; see `follow`."""

    def __init__(self) -> None:
        self._X: NDArray[np.float32] | None = None

    def follow(self, R: Exact, D: Tensor) -> None:
        """Takes over these masks, and R if it has moved too far.

        Args:
            R: (m, m). D: (n, m) of 0 and 1.
        """
        masks = D.numpy()
        if self._X is None or self._moved(R) > _DRIFT:
            n, m = masks.shape
            self._R, self._D = R.high.numpy().copy(), masks.copy()
            self._R_size = norm_up(R.high)
            self._X = np.zeros((n, m, m), dtype=np.float32) if self._X is None else self._X
            self._error, self._size = np.zeros(n), np.zeros(n)
            for i in range(n):
                self._renew(i)
        for i in np.flatnonzero((masks != self._D).any(axis=1)).tolist():
            units = np.flatnonzero(masks[i] != self._D[i]).tolist()
            if len(units) > _MOST_UPDATES or self._error[i] > _MOST_ERROR:
                self._D[i] = masks[i]
                self._renew(i)
            else:
                for u in units:
                    self._update(i, u)
        self._drift = self._moved(R)

    def _moved(self, R: Exact) -> float:
        """|R - R0|, from above."""
        return (norm_up(R.high - torch.from_numpy(self._R)) + norm_up(R.low)) * SLACK

    def _renew(self, i: int) -> None:
        """X_i from a matrix inverse in float32, whose residual is measured."""
        assert self._X is not None
        active = np.flatnonzero(self._D[i])
        A = np.eye(len(active)) - self._R[np.ix_(active, active)]
        inverse = np.linalg.inv(A.astype(np.float32))
        self._X[i] = 0.0
        self._X[i][np.ix_(active, active)] = inverse
        wide = inverse.astype(np.float64)
        self._size[i] = _norm(wide)
        residual = _norm(A @ wide - np.eye(len(active)))
        self._error[i] = (residual + 2 * gamma(len(active) + 2) * (_norm(A) * self._size[i] + len(active))) * SLACK

    def _update(self, i: int, u: int) -> None:
        """X_i after a change of the mask of unit u, by (2)."""
        assert self._X is not None
        sign = 1.0 - 2.0 * self._D[i, u]
        self._D[i, u] += sign
        X, row, m = self._X[i].astype(np.float64), self._R[u], len(self._R)
        b = row @ X
        b[u] += 1.0
        a = X @ self._R[:, u]
        a[u] += 1.0
        a *= sign / (1.0 - sign * float(row @ a))
        g = self._D[i] * (self._R @ a) - a
        g[u] += sign
        a_size, b_size = _norm(a), _norm(b)
        g_size = _norm(g) + gamma(m + 2) * (self._R_size * a_size + a_size + 1)
        b_error = gamma(m + 2) * (_norm(row) * self._size[i] + 1)
        # a, b and the sum are rounded to float32
        size = self._size[i] + a_size * b_size * (1 + 4 * _UNIT32)
        stored = 4 * _UNIT32 * (size + a_size * b_size) + 1e-30 * m
        self._X[i] += np.multiply.outer(a.astype(np.float32), b.astype(np.float32))
        self._size[i] = (size + stored) * SLACK
        self._error[i] = (self._error[i] + g_size * b_size + b_error + (1 + self._R_size) * stored) * SLACK

    def norm_of_sums(self, weights: Tensor, *, tau: float, inverse: float, change: float) -> float:
        """Upper bound of the norm of the blocks sum_i weights_ki T_i, side by side, on a ball.

        Args:
            weights: (k, n).
            tau: >= |T_i| on the ball. inverse: >= |(I - D_i R)^-1| on it.
            change: How far R moves in it.
        """
        assert self._X is not None
        n, m, _ = self._X.shape
        drift = self._drift + change
        left = 1 - tau * drift * SLACK
        scale = float(weights.abs().max())
        if not (left > 0 and 0 < scale < math.inf):
            return 0.0 if scale == 0 else math.inf
        c = (weights / scale).numpy()
        off = (inverse * self._error + tau**2 * drift) / left
        lost = np.abs(c) @ (off + _gamma32(n) * self._size)
        sums = (c.astype(np.float32) @ self._X.reshape(n, m * m)).reshape(len(c), m, m)
        square = 0.0
        total = np.zeros((m, m), dtype=np.float32)
        for S in sums:
            square += _norm(S.astype(np.float64)) ** 2
            total += S @ S.T
        G = torch.from_numpy(total.astype(np.float64))
        top = _largest_eigenvalue((G + G.T) / 2) + _gamma32(m + len(c)) * square + 1e-30 * m
        return (math.sqrt(top) + _norm(lost)) * scale * SLACK


def _norm(A: NDArray[Any]) -> float:
    """Upper bound of the Euclidean norm of all entries."""
    return norm_up(torch.from_numpy(np.ascontiguousarray(A)))


def _largest_eigenvalue(G: Tensor) -> float:
    """Upper bound for a positive semi-definite matrix, within a few per cent; a factorization that
    is checked, or the trace."""
    x = torch.ones(len(G), dtype=torch.float64) + G.diagonal() / float(G.diagonal().max() + 1e-300)
    for _ in range(_POWER_STEPS):
        x = G @ x
        x = x / float(torch.linalg.vector_norm(x) + 1e-300)
    t, factor = _FIRST * float(x @ (G @ x)), _RAISED
    for _ in range(_TESTS if t > 1e-200 else 0):
        L = shifted_factor(-G, t)
        if L is not None:
            return (t + unexplained(-G, L, -t)) * SLACK
        t, factor = t * factor, factor**2
    return float(G.diagonal().sum()) * SLACK + 1e-200
