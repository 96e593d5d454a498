r"""One point of a proof, computed again in 120 binary digits after the point.

The point is given by integers (`Digits`). If z is any vector and g = s(R z + c) - z, then u = z -
z* for the equilibrium z* is a solution of u = D R u - g with some diagonal 0 <= D <= 1, hence

    u = -(I + T R) g,     T = (I - D R)^-1 D,     |T| <= tau = 1/(1 - omega),                    (1)

so that |z - z*| <= (1 + tau |R|) |g|, and likewise for the adjoint. z and p are improved by Newton
steps until their defects g, h are of the size of the last digit; every digit of the result is
proved by (1), whatever the steps were.
"""

from __future__ import annotations

import math

import numpy as np

from wellposed.prove.verify_activation import CURVATURE, ENCLOSED, evaluate, values_in_floats
from wellposed.prove.verify_bounds import spectral_norm
from wellposed.prove.verify_digits import LOST, Digits, Floats
from wellposed.prove.verify_place import ROOM, Data, Place, norm, row_norms
from wellposed.prove.verify_reading import StoredProof


class NotFound(Exception):
    """No equilibrium or adjoint could be enclosed; the text says at which."""


class Recomputed:
    """Equilibria z, adjoints p, q, c and residuals r at a place, with bounds of their errors.

    Attributes:
        Z, P, Q, C, r: In digits. V: R z + c. Y: U x. D: Slopes. D_c: Of c; None if c = U x.
        z_error, p_error, q_error, c_error, r_error: (n,) distances to the exact values.
        v_error: (n, m) the same for V. R_norm: >= |R|.
    """

    def __init__(self, proof: StoredProof, data: Data, place: Place, tau: float, guess: tuple[Floats, Floats] | None) -> None:
        self._proof, self._data, self.place, self.tau = proof, data, place, tau
        m = proof.m
        R = place.R.floats()
        self.R_norm = spectral_norm(R) * ROOM
        loss = math.sqrt(m) * LOST  # of a row of a product
        factor = 1 + tau * self.R_norm
        self.Y = data.X @ place.U.T
        self.D_c = (self.Y.signs() > 0).astype(np.float64) if proof.rectified else None
        self.C = self.Y if self.D_c is None else self.Y.where(self.D_c)
        self.c_error = np.full(proof.n, loss + data.lost * norm(place.U.floats()))

        Z = Digits.of(self._first(R, self.C.floats()) if guess is None else guess[0])
        for _ in range(12):
            self.V = Z @ place.R.T + self.C
            values, self.D = evaluate(proof.activation, proof.shift, self.V)
            defect = (values - Z).floats()
            if np.abs(defect).max() <= 16 * LOST:
                break
            Z = Z + Digits.of(_solved(defect, self.D.floats(), R))
        else:
            raise NotFound("equilibria")
        self.Z = Z
        self.z_error = factor * (row_norms(defect) + loss + self.c_error + math.sqrt(m) * ENCLOSED) * ROOM
        rows = row_norms(R)
        self.v_error = (rows * self.z_error[:, None] + LOST + self.c_error[:, None]) * ROOM

        P = Digits.of(np.zeros(Z.shape) if guess is None else guess[1])
        slopes = self.D.floats()
        for _ in range(12):
            self.adjoint = P @ place.R + place.w.as_row()
            defect = (self.D * self.adjoint - P).floats()
            if np.abs(defect).max() <= 16 * LOST:
                break
            P = P + Digits.of(_solved(defect, slopes, R.T))
        else:
            raise NotFound("adjoints")
        self.P = P
        slope_error = ENCLOSED + LOST + CURVATURE[proof.activation] * self.v_error.max(axis=1)
        wobble = slope_error * row_norms(self.adjoint.floats()) if proof.smooth else 0.0
        self.p_error = factor * (row_norms(defect) + 3 * loss + wobble) * ROOM

        self.Q, self.q_error = P, self.p_error
        if self.D_c is not None:
            self.Q = (P if place.v is None else P + place.v.as_row()).where(self.D_c)
        self.r = Z @ place.w - data.y
        self.r_error = norm(place.w.floats()) * self.z_error + 4 * LOST
        if place.v is not None:
            self.r = self.r + self.C @ place.v
            self.r_error = self.r_error + norm(place.v.floats()) * self.c_error

    def _first(self, R: Floats, C: Floats) -> Floats:
        """A guess of the equilibria."""
        Z = np.zeros_like(C)
        for _ in range(300):
            Z = values_in_floats(self._proof.activation, self._proof.shift, Z @ R.T + C)
        return Z

    def gradient(self) -> dict[str, tuple[Digits, Digits]]:
        """For each trained part the factors (A, B) of its gradient A^T B."""
        weights = self.r.as_column()
        found = {
            "R": (self.P * weights, self.Z),
            "U": (self.Q * weights, self._data.X),
            "w": (weights, self.Z),
            "v": (weights, self.C),
        }
        return {part: pair for part, pair in found.items() if self._proof.scales.get(part, 0.0) > 0}

    def gradient_error(self) -> float:
        """|J^T r - what `gradient` gives|, from above."""
        X_rows = self._data.x_norms
        k, ell = self._proof.scales["R"], self._proof.scales["U"]
        r, z, p, q = np.abs(self.r.floats()), row_norms(self.Z.floats()), row_norms(self.P.floats()), row_norms(self.Q.floats())
        c = row_norms(self.C.floats())
        rows = z + c + k * p * z + ell * q * X_rows
        change = (
            self.z_error
            + self.c_error
            + k * (self.p_error * (z + self.z_error) + p * self.z_error)
            + ell * self.q_error * X_rows
        )
        lost = LOST * (self._proof.m + self._proof.d + 2) * self._proof.m  # of the products themselves
        return (float((self.r_error * (rows + change) + r * change).sum()) + lost * float(r.sum() + 1)) * ROOM


def _solved(defect: Floats, D: Floats, R: Floats) -> Floats:
    """u = defect + D (R u) sample by sample, to a few digits at least."""
    size = float(np.abs(defect).max())
    b = defect / size
    u = b
    for _ in range(200):
        following = b + D * (u @ R.T)
        change = float(np.abs(following - u).max())
        u = following
        if change < 1e-13:
            return u * size
        if change > 1e3:
            break
    eye = np.eye(R.shape[0])
    return np.stack([np.linalg.solve(eye - d[:, None] * R, row) for d, row in zip(D, b, strict=True)]) * size
