r"""What one pair (J, S) in the ball of a ReLU tail says about its constants.

J is the Jacobian at a point and S a secant that begins there: the rows of both are (z, k p (x) z, l
q (x) x, c) with the same z, x, c, and with adjoints p, q of other slopes. With N = (S + J)/2 and F
= (S - J)/2 the constants of the tail must have

    s <= sigma_min(N),   |N| <= L,   |F| <= f,   |S F^T| <= e0,   F F^T <= g N N^T + g0.

S = J is such a pair, of which the last says g sigma_min(J)^2 + g0 >= 0. All is computed in float64
from adjoints that are right to about 1e-12, so every comparison leaves room for more than that.
"""

from __future__ import annotations

import math

import numpy as np

from wellposed.prove.verify_digits import Floats
from wellposed.prove.verify_reading import StoredProof
from wellposed.prove.verify_step import PointCheck, Report

#: What adjoints in float64 may lack, relative to their rows, with plenty of room.
_COMPUTED = 1e-9
_ITERATIONS = 500


def adjoints(w: Floats, R: Floats, slopes: Floats) -> tuple[Floats, bool]:
    """p = D (w + R^T p) for each row of slopes, and whether the iteration has settled."""
    P = np.zeros_like(slopes)
    for _ in range(_ITERATIONS):
        before, P = P, slopes * (w + P @ R)
        change, size = float(np.abs(P - before).max()), float(np.abs(P).max())
        if not change < 1e6:
            return P, False
        if change <= 1e-13 * size:
            return P, True
    return P, False


class Rows:
    """The parts of all rows that J and S have in common: z, x, c."""

    def __init__(self, proof: StoredProof, Z: Floats, C: Floats, XX: Floats) -> None:
        self._ZZ, self._XX = Z @ Z.T, XX
        self._k, self._l = proof.scales["R"], proof.scales["U"]
        self._fixed = self._ZZ * (proof.scales["w"] > 0)
        if proof.scales.get("v", 0.0) > 0:
            self._fixed = self._fixed + C @ C.T

    def _products(self, one: tuple[Floats, Floats], other: tuple[Floats, Floats]) -> Floats:
        """Of the parts p (x) z and q (x) x."""
        (P, Q), (P1, Q1) = one, other
        return np.asarray(self._k**2 * (P @ P1.T) * self._ZZ + self._l**2 * (Q @ Q1.T) * self._XX)

    def check(self, proof: StoredProof, J: tuple[Floats, Floats], S: tuple[Floats, Floats], where: str, report: Report) -> None:
        """The constants of the tail against the pair with the adjoints (p, q) of J and of S."""
        assert proof.tail is not None
        s, L, f, e0 = (proof.tail[name] for name in ("s", "L", "f", "e0"))
        g, g0 = proof.tail.get("g", 0.0), proof.tail.get("g0", f * f)
        N, F = ((J[0] + S[0]) / 2, (J[1] + S[1]) / 2), ((S[0] - J[0]) / 2, (S[1] - J[1]) / 2)
        H, FF, SF = self._products(N, N) + self._fixed, self._products(F, F), self._products(S, F)
        size = math.sqrt(float(np.trace(H)))
        lost = _COMPUTED * size  # of a matrix of rows
        values = np.linalg.eigvalsh((H + H.T) / 2)
        low, high = math.sqrt(max(0.0, float(values[0]))), math.sqrt(max(0.0, float(values[-1])))
        fine = s * s <= float(values[0]) + lost * size and high <= L + lost
        report("tail", fine, f"s = {s:.6g}, L = {L:.6g} stored; {where} needs at most {low:.6g}, at least {high:.6g}")
        jump, pull = math.sqrt(max(0.0, float(np.linalg.eigvalsh(FF)[-1]))), float(np.linalg.norm(SF, 2))
        fine = jump <= f + lost and pull <= e0 + lost * (size + jump)
        report("tail", fine, f"f = {f:.4g}, e0 = {e0:.4g} stored; {where} needs {jump:.4g}, {pull:.4g}")
        left = float(np.linalg.eigvalsh(g * H + g0 * np.eye(len(H)) - (FF + FF.T) / 2)[0])
        fine = left >= -(_COMPUTED * (g * size**2 + abs(g0)) + 2 * lost * jump + lost**2)
        if "g" in proof.tail:  # else it says no more than |F| <= f
            report("tail", fine, f"g N N^T + g0 - F F^T has the eigenvalue {left:.4g}; {where} needs 0 or more")


def check_point_pair(proof: StoredProof, check: PointCheck, k: int, report: Report) -> None:
    """The pair S = J at a recomputed point."""
    point = check.point
    J = point.P.floats(), point.Q.floats()
    Rows(proof, point.Z.floats(), point.C.floats(), check.data.XX).check(proof, J, J, f"point {k}", report)


def check_secant(proof: StoredProof, one: PointCheck, other: PointCheck, where: str, report: Report) -> None:
    """The pair of J at a point and of the secant from it to another."""
    start, end = one.point, other.point
    D = _secant_slopes(start.V.floats(), end.V.floats())
    P, settled = adjoints(other.place.w.floats(), other.R, D)
    if not settled:
        return
    Q = P
    if proof.rectified:
        read = P if other.place.v is None else P + other.place.v.floats()
        Q = _secant_slopes(start.Y.floats(), end.Y.floats()) * read
    rows = Rows(proof, start.Z.floats(), start.C.floats(), one.data.XX)
    rows.check(proof, (start.P.floats(), start.Q.floats()), (P, Q), where, report)


def _secant_slopes(V: Floats, V1: Floats) -> Floats:
    """(relu(v') - relu(v))/(v' - v)."""
    switched = (V > 0) != (V1 > 0)
    gap = np.where(switched, V1 - V, 1.0)
    return np.where(switched, (np.maximum(V1, 0.0) - np.maximum(V, 0.0)) / gap, (V > 0).astype(np.float64))
