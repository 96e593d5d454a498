"""The tail of a stored proof: its constants at every stored point of its ball, and at a few exact
steps beyond."""

from __future__ import annotations

import math

import numpy as np

from wellposed.prove.verify_bounds import is_positive
from wellposed.prove.verify_digits import Digits, Floats
from wellposed.prove.verify_jumps import Switches, check_jumps
from wellposed.prove.verify_pairs import check_point_pair, check_secant
from wellposed.prove.verify_place import ROOM, Data, distance_between, norm, row_norms, stored_place
from wellposed.prove.verify_reading import StoredProof
from wellposed.prove.verify_step import (
    ABOVE,
    ABOVE_WIDE,
    WIDE,
    PointCheck,
    Report,
    StoredBall,
    loss_agrees,
    residual_scale,
)

#: Steps after the last point that are computed in more digits.
_STEPS = 2


def check_tail(proof: StoredProof, data: Data, report: Report) -> list[int]:
    """The numbers of `tail` at point K, and its conclusion for two further steps.

    Returns:
        The points at which the bounds of the singular values were compared with new ones: K, all
        checkpoints in the ball of the tail, and the two further ones.
    """
    assert proof.tail is not None
    tail, K, delta = proof.tail, proof.K, proof.steps["delta"][proof.K]
    radius = float(proof.document["radius"])
    check = PointCheck(proof, data, stored_place(proof, K))
    ball = StoredBall(proof, data, check.point, check.omega, delta)
    if not ball.holds:
        report("omega", False, f"point {K}: omega is {check.omega:.6g}")
        return []
    most = check.omega + (ABOVE if proof.m < WIDE else ABOVE_WIDE)
    fine = check.omega_below <= tail["omega"] <= most and check.omega + proof.scales["R"] * (delta + radius) < 1
    report("omega", fine, f"point {K}: {tail['omega']:.6g} stored, between {check.omega_below:.6g} and {check.omega:.6g}")
    r = check.point.r.floats()
    L = math.sqrt(check.J_square) + ball.dJ
    L = min(L, tail["L"]) if proof.smooth else L  # |J| <= tail.L in a larger ball is checked by itself
    most = norm(r) + norm(check.point.r_error) + L * delta
    fine = most <= tail["residual"] <= 1.001 * most + 1e-9 * norm(data.y.floats()) + residual_scale(check)
    report("tail", fine, f"residual {tail['residual']:.8g} stored, at most {most:.8g} found")
    loss = float(proof.document["loss"])
    report("loss", loss_agrees(check, loss), f"point {K}: {loss:.10g} stored, {check.loss:.10g} found")
    far = distance_between(proof, check.place, stored_place(proof, 0)) + delta + radius
    stated = proof.number("distance", proof.document.get("distance"), least=0.0)
    report("distance", far <= stated <= 1.001 * far, f"{stated:.8g} stored, {far:.8g} found")
    if not proof.smooth:
        switches = Switches(proof, check, radius + delta)
        _check_switches(proof, check, switches, radius + delta, report)
        check_jumps(proof, check, switches, report)
    _check_singular_values(proof, check, K, report)
    return [*_check_stored(proof, data, check, radius - delta, report), K, *_check_steps(proof, data, check, report)]


def _check_stored(proof: StoredProof, data: Data, last: PointCheck, radius: float, report: Report) -> list[int]:
    """The constants at every other checkpoint that is so near to point K, which is `delta` from the
    centre of the ball."""
    found = []
    for k in proof.checkpoints:
        place = stored_place(proof, k)
        path = distance_between(proof, place, last.place)
        if k < proof.K and path <= radius:
            check = PointCheck(proof, data, place, (last.point.Z.floats(), last.point.P.floats()))
            _check_singular_values(proof, check, k, report)
            _check_change(proof, check, last, path, f"between points {k} and {proof.K}", report)
            found.append(k)
    return found


def _check_switches(proof: StoredProof, check: PointCheck, switches: Switches, rho: float, report: Report) -> None:
    """The count of `format`, made again; and a unit that is off at a sample can be switched on by
    its own row of (R, U) alone, if its pre-activation is below rho |xi|: at least as many may
    switch. So can those of `switches`, also from on to off, and units of c = relu(U x) by their row
    of U."""
    assert proof.tail is not None
    point, k, ell = check.point, proof.scales["R"], proof.scales["U"]
    z = k * row_norms(point.Z.floats())
    xi = np.hypot(z, 0.0 if proof.rectified else check.data.x_norms)
    V = point.V.floats()
    least = int(((V < 0) & (-V < 0.999 * rho * xi[:, None])).sum())
    least = max(least, len(switches.i))
    far = (1 + (row_norms(check.R) + k * rho) / (1 - proof.tail["omega"] - k * rho)) * rho
    count = int((np.abs(V) <= np.hypot(z, ell * check.data.x_norms)[:, None] * far).sum())
    if proof.rectified and ell > 0:
        reach = ell * rho * check.data.x_norms
        least += int((np.abs(point.Y.floats()) < 0.999 * reach[:, None]).sum())
        count += int((np.abs(point.Y.floats()) <= reach[:, None]).sum())
    stored = proof.tail["switches"]
    report("tail", least <= stored, f"{stored:g} switches stored, at least {least} are possible")
    report("tail", stored == count, f"{stored:g} switches stored, {count} counted")


def _check_singular_values(proof: StoredProof, check: PointCheck, k: int, report: Report) -> None:
    """s <= sigma_min(J) and |J| <= L: at the last point, and at any other in the ball."""
    assert proof.tail is not None
    s, L = proof.tail["s0" if proof.smooth else "s"], proof.tail["L"]
    n = proof.n
    if not proof.smooth or k == proof.K:
        fine = is_positive(check.H - s * s * ROOM * np.eye(n), check.H_error)
        report("tail", fine, f"point {k}: sigma_min(J) is not proved to be at least {s:.6g}")
    if not proof.smooth:
        check_point_pair(proof, check, k, report)
    fine = math.sqrt(max(0.0, check.J_square_below)) <= L
    report("tail", fine, f"point {k}: |J| is at least {math.sqrt(max(0.0, check.J_square_below)):.6g}, and L {L:.6g}")


def _check_change(proof: StoredProof, one: PointCheck, other: PointCheck, path: float, where: str, report: Report) -> None:
    """|J - J'| <= Lambda |theta - theta'| for smooth activations; for ReLU both secants."""
    assert proof.tail is not None
    if proof.smooth:
        change = _jacobian_change(one, other)
        report("tail", change <= proof.tail["Lambda"] * path * ROOM, f"{where}: J changes by {change:.4g} over {path:.4g}")
    else:
        check_secant(proof, one, other, f"the secant {where}", report)
        check_secant(proof, other, one, f"the secant {where}", report)


def _check_steps(proof: StoredProof, data: Data, check: PointCheck, report: Report) -> list[int]:
    """Exact descent from the last point: the residual falls at the rate, and stays in the ball."""
    assert proof.tail is not None
    rate, radius = float(proof.document["rate"]), float(proof.document["radius"])
    start = check
    for j in range(1, _STEPS + 1):
        before = check
        check = PointCheck(proof, data, before.stepped(), (before.point.Z.floats(), before.point.P.floats()))
        old, new = norm(before.point.r.floats()), norm(check.point.r.floats())
        report("tail", new <= rate * old * ROOM + 1e-20, f"step {proof.K + j}: the residual falls by {new / old:.8g} only")
        moved = distance_between(proof, check.place, start.place)
        report("tail", moved <= radius, f"step {proof.K + j}: {moved:.4g} from point K, farther than the radius {radius:.4g}")
        _check_singular_values(proof, check, proof.K + j, report)
        path = distance_between(proof, check.place, before.place)
        _check_change(proof, before, check, path, f"of step {proof.K + j}", report)
    return list(range(proof.K + 1, proof.K + _STEPS + 1))


def _jacobian_change(one: PointCheck, other: PointCheck) -> float:
    """|J - J'|, from below, for c = U x: p (x) xi - p' (x) xi' = dp (x) xi + p' (x) dxi."""

    def change(name: str) -> Floats:
        a: Digits = getattr(one.point, name)
        return (a - getattr(other.point, name)).floats()

    dz, dp = change("Z"), change("P")
    Z, P, X = one.point.Z.floats(), other.point.P.floats(), one.data.X.floats()
    xi = Z @ Z.T + X @ X.T
    mixed = (dp @ P.T) * (Z @ dz.T)
    G = (dp @ dp.T) * xi + (P @ P.T) * (dz @ dz.T) + mixed + mixed.T + dz @ dz.T
    return math.sqrt(max(0.0, float(np.linalg.eigvalsh(G)[-1]))) * (1 - 1e-6)
