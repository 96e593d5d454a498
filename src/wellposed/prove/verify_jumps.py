r"""How much the Jacobian jumps where a unit switches in the ball of a tail, from below.

If unit u is held at 0, the equilibrium z' of a sample, its adjoint p' and a = (w + R^T p')_u do not
depend on the row of u. This row alone can be moved so that the pre-activation of u is 0 at z', by
|(R z' + c)_u|/|xi'|. There the adjoint jumps by a lambda, lambda = e_u + D R'^T lambda, so that J
jumps by at least |a| |xi'|/(1 + |R'|). Of the two sides one is J and the other the limit of
secants: |F| is at least half of it, and |F F^T| its square. So is the larger |S F^T| of the two
choices of the sides, whose difference is 2 F F^T. As |N^T r| <= L |r|, also g L^2 + g0 is at least
this square.
"""

from __future__ import annotations

import numpy as np

from wellposed.prove.verify_place import row_norms
from wellposed.prove.verify_reading import StoredProof
from wellposed.prove.verify_step import PointCheck, Report

#: Pairs (sample, unit) that are tried: those nearest to a switch.
_PAIRS, _ITERATIONS = 32, 300


def check_jumps(proof: StoredProof, check: PointCheck, rho: float, report: Report) -> None:
    """f and e0 of a tail are not below what a switch in the ball of radius rho makes necessary."""
    assert proof.tail is not None
    point, R, k = check.point, check.R, proof.scales["R"]
    x = np.zeros(proof.n) if proof.rectified else proof.scales["U"] * check.data.x_norms
    xi = np.hypot(k * row_norms(point.Z.floats()), x) + 1e-300
    nearness = np.abs(point.V.floats()) / xi[:, None]
    i, u = np.unravel_index(np.argsort(nearness, axis=None)[:_PAIRS], nearness.shape)
    C, w, others = point.C.floats()[i], check.place.w.floats(), np.ones((len(i), proof.m))
    others[np.arange(len(i)), u] = 0.0
    Z, P = point.Z.floats()[i] * others, point.P.floats()[i]
    for _ in range(_ITERATIONS):
        before, Z = Z, np.maximum(Z @ R.T + C, 0.0) * others
    V = Z @ R.T + C
    D = (V > 0) * others
    for _ in range(_ITERATIONS):
        last, P = P, D * (w + P @ R)
    unsettled = (1 + point.tau * point.R_norm) * (row_norms(Z - before) + row_norms(P - last))
    settled = unsettled <= 1e-6 * np.minimum(row_norms(Z), row_norms(P))
    xi = np.hypot(k * row_norms(Z), x[i])
    own = np.arange(len(i)), u
    inside = (np.isfinite(unsettled) & (settled | (unsettled == 0))) & (np.abs(V[own]) < 0.999 * rho * xi)
    jumps = 0.999 * np.abs((w + P @ R)[own]) * xi / (2 * (1 + point.R_norm + k * rho))
    least = float(np.where(inside, jumps, 0.0).max())
    f, e0, square = proof.tail["f"], proof.tail["e0"], proof.tail["g"] * proof.tail["L"] ** 2 + proof.tail["g0"]
    fine = f >= least and e0 >= least**2 and square >= least**2
    stored = f"f = {f:.4g}, e0 = {e0:.4g}, g L^2 + g0 = {square:.4g} stored"
    report("tail", fine, f"{stored}; a switch needs {least:.4g}, {least**2:.4g}, {least**2:.4g}")
