r"""Norms of the resolvents of single samples, from explicit inverses, at a point and on a ball.

T_i = (I - D_i R)^-1 D_i and K_i = (I - R D_i)^-1 = I + R T_i for smooth slopes D_i. If R and D_i
change so that R D_i changes by E, then A = I - R D_i becomes A - E, |(A - E) x| >= (1 - |E||K_i|)
|A x| for all x, and every norm of something times K_i grows by 1/(1 - |E||K_i|) at most.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from wellposed.prove.verify_bounds import UNIT, is_positive, spectral_norm, symmetric_norm, top_eigenvalue
from wellposed.prove.verify_digits import Floats
from wellposed.prove.verify_place import ROOM, norm, row_norms


@dataclass(frozen=True)
class Change:
    """How far things move on a ball.

    Attributes:
        R: |dR|. D: (n,) |dD_i|, Euclidean. b: (n, m) |db_iu|. z: (n,) |dz_i|.
    """

    R: float
    D: Floats
    b: Floats
    z: Floats


class Bend:
    """E on a ball: the largest sum_i |r_i| c_i |dOmega xi_i|^2, c_i >= |K_i^T diag(b_i) K_i|.

    Args:
        R: (m, m). b: (n, m) a s'' at the centre. change: On the ball.
        weights: (n,) >= |r_i| on the ball. c: (n,) known bounds of the c_i on the ball.
    """

    def __init__(self, R: Floats, b: Floats, change: Change, weights: Floats, c: Floats) -> None:
        self._R, self._b, self._change, self._weights, self.c = R, b, change, weights, np.array(c)
        self._R_norm, self._column = spectral_norm(R), float(row_norms(R.T).max())
        self._T, self._K = _Largest(), _Largest()
        self.tau = 0.0

    def add(self, i: int, T: Floats, wrong: float) -> None:
        """Sample i, whose T is `wrong` at most."""
        m, largest = len(T), float(np.abs(self._b[i]).max())
        K = np.eye(m) + self._R @ T
        K_wrong = (self._R_norm * wrong + 8 * (m + 4) * UNIT * (norm(self._R) * norm(T) + math.sqrt(m))) * ROOM
        T_norm, K_norm = self._T.with_matrix(T) + wrong, (self._K.with_matrix(K) + K_wrong) * ROOM
        moved = self._change.D[i]
        left = 1 - (self._change.R + self._column * moved) * K_norm * ROOM
        if not (math.isfinite(wrong) and left > 0):
            self.tau = math.inf
            return
        self.tau = max(self.tau, (T_norm + moved * K_norm) / left * ROOM)
        C = K.T @ (self._b[i][:, None] * K)
        error = largest * (16 * (m + 4) * UNIT * norm(K) ** 2 + (2 * K_norm + K_wrong) * K_wrong) * ROOM
        c = symmetric_norm(C, error) + K_norm**2 * float(self._change.b[i].max())
        self.c[i] = min(self.c[i], c / left**2 * ROOM)

    def upper(self, G: Floats) -> float:
        """E, given the Gram matrix of the xi_i, k = l = 1."""
        g = np.sqrt(self._weights * self.c)
        error = 1e-12 * float(np.trace(G)) * float(np.square(g).max())
        top = max(0.0, top_eigenvalue(g[:, None] * G * g, error))
        return (math.sqrt(top) + norm(g * self._change.z)) ** 2 * ROOM


class _Largest:
    """The largest norm of some matrices, a little above."""

    def __init__(self) -> None:
        self._bound = 0.0

    def with_matrix(self, A: Floats) -> float:
        """The bound once A is among them."""
        error = 8 * (len(A) + 4) * UNIT * norm(A) ** 2
        if not (self._bound and is_positive(self._bound**2 * np.eye(len(A)) - A @ A.T, error)):
            self._bound = max(self._bound, spectral_norm(A) * (1 + 1e-3))
        return self._bound
