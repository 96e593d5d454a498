r"""Points of the ball of a tail where a unit switches, and the two Jacobians that meet there.

If unit u is held at 0, the equilibrium z' of a sample i does not depend on the row of u in (R, U).
This row alone can be moved so that the pre-activation of u is 0 at z', by |(R z' + c)_u|/|xi'|, xi'
= (k z', l x). If that is less than the radius, the point is in the ball, and the slope of u at
sample i may be 0 or 1 there: of these two Jacobians one is J and the other the limit of secants.
The equilibria of all samples are computed at the moved row, and the pair is compared with the
constants of the tail (`verify_pairs`), both ways.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wellposed.prove.verify_digits import Floats
from wellposed.prove.verify_pairs import Rows, adjoints
from wellposed.prove.verify_place import row_norms
from wellposed.prove.verify_reading import StoredProof
from wellposed.prove.verify_step import PointCheck, Report

#: Pairs (sample, unit) that are compared: those nearest to a switches.
_PAIRS, _ITERATIONS = 32, 500
#: Most pairs that are counted: no tail has as many.
_MOST = 4000
#: Part of the radius within which points are sure to be in the ball.
_INSIDE = 0.999
#: Other pre-activations at a moved row are farther from 0 than this part of the largest.
_CLEAR = 1e-9


class Switches:
    """The pairs (sample i, unit u) that their own row of (R, U) can switch in the ball of radius
    rho: the nearest first.

    Attributes:
        i, u: (E,) of each pair. Z: (E, m) equilibria of the samples with u held at 0. V: (E,) the
            pre-activations of u there. xi: (E,) how far a row that moves by 1 can move them.
    """

    def __init__(self, proof: StoredProof, check: PointCheck, rho: float) -> None:
        point, R, k = check.point, check.R, proof.scales["R"]
        x = np.zeros(proof.n) if proof.rectified else proof.scales["U"] * check.data.x_norms
        xi = np.hypot(k * row_norms(point.Z.floats()), x) + 1e-300
        nearness = np.abs(point.V.floats()) / xi[:, None]
        order = np.argsort(nearness, axis=None)[: min(_MOST, int((nearness < 2 * rho).sum()))]
        i, u = np.unravel_index(order, nearness.shape)
        C, others, own = point.C.floats()[i], np.ones((len(i), proof.m)), (np.arange(len(i)), u)
        others[own] = 0.0
        Z, settled = _equilibria(R, C, point.Z.floats()[i], others)
        V = (Z @ R.T + C)[own]
        xi = np.hypot(k * row_norms(Z), x[i])
        kept = settled & (np.abs(V) < _INSIDE * rho * xi)
        self.i, self.u, self.Z, self.V, self.xi = i[kept], u[kept], Z[kept], V[kept], xi[kept]


def _equilibria(R: Floats, C: Floats, Z: Floats, others: Floats) -> tuple[Floats, NDArray[np.bool_]]:
    """z = relu(R z + c) row by row, 0 where `others` is; and whether each row has settled."""
    Z = Z * others
    settled = np.ones(len(Z), dtype=bool)
    for _ in range(_ITERATIONS):
        before, Z = Z, np.maximum(Z @ R.T + C, 0.0) * others
        settled = np.abs(Z - before).max(axis=1, initial=0.0) <= 1e-13 * np.abs(Z).max(axis=1, initial=0.0)
        if settled.all() or not np.isfinite(Z).all():
            break
    return Z, settled & np.isfinite(Z).all(axis=1)


def check_jumps(proof: StoredProof, check: PointCheck, switches: Switches, report: Report) -> None:
    """The constants of a tail at the switches nearest to point K."""
    for e in range(min(_PAIRS, len(switches.i))):
        i, u = int(switches.i[e]), int(switches.u[e])
        _check_jump(proof, check, (i, u), switches.Z[e], float(switches.V[e] / switches.xi[e] ** 2), report)


def _check_jump(proof: StoredProof, check: PointCheck, pair: tuple[int, int], z: Floats, share: float, report: Report) -> None:
    """One pair: the row of u moves by -share (k^2 z, l^2 x), in R and U."""
    (i, u), point, data = pair, check.point, check.data
    R, C = check.R.copy(), point.C.floats().copy()
    R[u] -= share * proof.scales["R"] ** 2 * z
    if not proof.rectified:
        C[:, u] -= share * proof.scales["U"] ** 2 * data.XX[:, i]
    others = np.ones_like(C)
    others[i, u] = 0.0
    Z, settled = _equilibria(R, C, point.Z.floats(), others)
    V = Z @ R.T + C
    near = np.where(others > 0, np.abs(V), np.inf).min(initial=np.inf)
    if not settled.all() or near <= _CLEAR * np.abs(V).max():
        return
    D = (V > 0).astype(np.float64) * others
    sides = []
    for slope in (0.0, 1.0):
        D[i, u] = slope
        P, done = adjoints(check.place.w.floats(), R, D)
        Q = P
        if point.D_c is not None:
            Q = point.D_c * (P if check.place.v is None else P + check.place.v.floats())
        sides.append((P, Q))
        if not done:
            return
    rows = Rows(proof, Z, C, data.XX)
    for one, other in ((0, 1), (1, 0), (0, 0), (1, 1)):
        rows.check(proof, sides[one], sides[other], "a switch", report)
