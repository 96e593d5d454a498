r"""Steps of descent computed again in more digits, between two checkpoints of a stored proof.

The exact step is taken from the stored point k, and again from its result, up to the next
checkpoint k'. By Theorem A, applied from k on, the exact iterates are within d_j of the computed
points, where d_k = 0 and d_{j+1} = (1 + eta M_j) d_j + eps_j. At each point the stored numbers are
compared with bounds made here, and at k' the distance itself with d_k'.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from wellposed.prove.verify_activation import CURVATURE, THIRD, curvature, signed_curvature
from wellposed.prove.verify_bounds import UNIT, active_omega, omega_bounds, spectral_norm, top_eigenvalue
from wellposed.prove.verify_digits import LOST, Digits, Floats
from wellposed.prove.verify_expansion import curvature_weights, expansion_upper
from wellposed.prove.verify_place import (
    ROOM,
    Data,
    Place,
    distance_between,
    entries,
    norm,
    row_norms,
    stored_place,
    stored_values,
)
from wellposed.prove.verify_point import NotFound, Recomputed
from wellposed.prove.verify_reading import StoredProof
from wellposed.prove.verify_resolvent import Bend, Change

#: Called with a name, whether it holds, and what was compared.
Report = Callable[[str, bool, str], None]
#: float64 numbers of a stored point are right to this, relative to the scale of their terms; they are not bounds.
_COMPUTED = 1e-9
#: Bounds that are made of computed numbers by a formula of `format` agree to this.
_CLOSE = 1e-4
#: How far the rounding of a pre-activation, which is below delta, may change its ratio.
_ROUNDED = 0.25
#: By how much a stored omega may exceed the eigenvalue, below and from `WIDE` units: see `wellposed.prove.format`.
ABOVE, ABOVE_WIDE, WIDE = 0.021, 0.13, 800


class StoredBall:
    """Changes over a ball of radius rho about a recomputed point: bounds, sample by sample."""

    def __init__(self, proof: StoredProof, data: Data, point: Recomputed, omega: float, rho: float) -> None:
        k, ell, w, v = (float(proof.scales.get(part, 0.0)) for part in "RUwv")
        self.holds = omega + k * rho < 1
        tau = self.tau = ROOM / (1 - omega - k * rho) if self.holds else math.inf
        z, p, self.rho = row_norms(point.Z.floats()), row_norms(point.P.floats()), rho
        self.R_norm = (point.R_norm + k * rho) * ROOM
        self.xi = np.hypot(k * (z + point.z_error), ell * data.x_norms) * ROOM
        exact = 4 * UNIT  # values are used as float64 numbers
        self.dz = (tau * rho * self.xi + point.z_error + exact * z) * ROOM
        self.dv = (rho * self.xi + self.R_norm * self.dz) * ROOM
        read = np.hypot(w, k * p)
        bent = CURVATURE[proof.activation] * self.dv * (np.abs(point.adjoint.floats()).max(axis=1) + 1e-12)
        self.dp = (tau * rho * read + (1 + self.R_norm * tau) * bent + point.p_error + exact * p) * ROOM
        self.dq = (self.dp + v * rho) * ROOM
        self.dc = (ell * rho * data.x_norms + point.c_error) * ROOM
        rows = (k * ((p + self.dp) * self.dz + self.dp * z)) ** 2 + (ell * self.dq * data.x_norms) ** 2
        self.dJ = math.sqrt(float((rows + (w * self.dz) ** 2 + (v * self.dc) ** 2).sum())) * ROOM
        self.dT = (tau**2 * k * rho + CURVATURE[proof.activation] * float(self.dv.max()) * (1 + self.R_norm * tau) ** 2) * ROOM


class PointCheck:
    """A place, recomputed, and the bounds that hold there."""

    def __init__(self, proof: StoredProof, data: Data, place: Place, guess: tuple[Floats, Floats] | None = None) -> None:
        self.proof, self.data, self.place = proof, data, place
        self.R = place.R.floats()
        self.omega_below, self.omega = omega_bounds(self.R, (LOST + 4 * UNIT) * norm(self.R))
        if not self.omega < 1:
            raise NotFound(f"a contraction: omega is only known to be at most {self.omega:.6g}; equilibria")
        self.point = Recomputed(proof, data, place, ROOM / (1 - self.omega), guess)
        point = self.point
        k, ell = proof.scales["R"], proof.scales["U"]
        ZZ, PP = gram(point.Z), gram(point.P)
        self.H = k * k * PP * ZZ + ell * ell * (gram(point.Q) if proof.rectified else PP) * data.XX
        if proof.scales["w"] > 0:
            self.H = self.H + ZZ
        if proof.scales.get("v", 0.0) > 0:
            self.H = self.H + gram(point.C)
        self.H_error = 64 * UNIT * float(np.trace(self.H))  # entries are products of float64 numbers, right to 2^-49
        self.J_square = top_eigenvalue(self.H, self.H_error)
        vector = np.linalg.eigh((self.H + self.H.T) / 2)[1][:, -1]
        self.J_square_below = float(vector @ self.H @ vector) / float(vector @ vector) - 2 * self.H_error

    @property
    def loss(self) -> float:
        """|r|^2/2."""
        return float(np.square(self.point.r.floats()).sum()) / 2

    def expansion(self, ball: StoredBall) -> float:
        """M on the ball, from above."""
        proof, point = self.proof, self.point
        k, ell = proof.scales["R"], proof.scales["U"]
        Z, P, X, r = point.Z.floats(), point.P.floats(), self.data.X.floats(), point.r.floats()
        p_max = float((row_norms(P) + ball.dp).max())
        Xi = math.hypot(k * spectral_norm(Z), ell * spectral_norm(X)) + k * norm(ball.dz)
        tau = self.tau(ball)
        r_norm, dr = norm(r), norm(point.r_error) + (math.sqrt(self.J_square) + ball.dJ) * ball.rho + 4 * UNIT * norm(r)
        read = math.hypot(proof.scales["w"], k * p_max)
        if proof.rectified:
            A = r_norm * math.hypot(
                tau * Xi * (proof.scales["w"] > 0), ell * spectral_norm(X) * (proof.scales.get("v", 0.0) > 0)
            )
            B = k * p_max * tau * r_norm * Xi
            return (B + math.hypot(A, B) + 2 * dr * (tau * read * Xi + ell * spectral_norm(X))) * ROOM
        bend = self._bend(ball, tau, np.abs(r) + dr) if proof.smooth else None
        centre = expansion_upper(self.R, Z, X, P, point.D.floats(), r, tau, bend)
        tau = tau if bend is None else min(tau, bend.tau)
        moved = k * float(ball.dp.max()) * tau * Xi + read * tau * k * norm(ball.dz) + read * ball.dT * Xi
        return (centre + 2 * dr * tau * read * Xi + 2 * r_norm * moved) * ROOM

    def tau(self, ball: StoredBall) -> float:
        """Upper bound of |(I - D R)^-1 D| and |D^1/2 (I - R D)^-1| for the slopes in the ball."""
        proof, change = self.proof, self.proof.scales["R"] * ball.rho
        bend = CURVATURE[proof.activation]
        slopes = np.minimum(1.0, self.point.D.floats() + bend * (ball.dv[:, None] + self.point.v_error + 1e-15))
        lost = (LOST + 4 * UNIT) * norm(self.R) + change
        omega = min(self.omega + change, active_omega(self.R, lost, slopes))
        return ROOM / (1 - omega) if omega < 1 else math.inf

    def _bend(self, ball: StoredBall, tau: float, weights: Floats) -> Bend:
        """E on the ball, for c = U x."""
        point, name = self.point, self.proof.activation
        da = ball.rho * np.hypot(1.0, row_norms(point.P.floats()) + ball.dp) + (ball.R_norm + 2) * ball.dp
        a, V = point.adjoint.floats(), point.V.floats()
        moved = ball.dv + point.v_error.max(axis=1) + 4 * UNIT
        lost = self.proof.scales["R"] * ball.rho + (LOST + 4 * UNIT) * norm(self.R)
        most = np.abs(a) + da[:, None]
        c = curvature_weights(name, V, most, moved, tau=tau, R_norm=ball.R_norm, R=self.R, change=lost)
        # a' s''(v') - a s''(v) = (a' - a) s''(v) + a' (s''(v') - s''(v))
        b = a * signed_curvature(name, V)
        db = da[:, None] * curvature(name, V) + most * (THIRD[name] * moved[:, None] + 1e-14)
        dD = CURVATURE[name] * moved * ROOM + math.sqrt(self.proof.m) * 4 * UNIT
        return Bend(self.R, b, Change(lost * ROOM, dD, db * ROOM, ball.dz), weights, c)

    def mask_ratio(self, ball: StoredBall) -> float:
        """Least |pre-activation| over its change on the ball."""
        point, k, ell = self.point, self.proof.scales["R"], self.proof.scales["U"]
        V = np.abs(point.V.floats())
        change = (ball.rho * ball.xi)[:, None] * (1 + (row_norms(self.R) + k * ball.rho) * ball.tau) * ROOM + 1e-300
        ratio = float(((V - point.v_error) / change).min())
        if self.proof.rectified and ell > 0:  # where U is fixed, c is too
            Y = np.abs(point.Y.floats())
            change = (ell * ball.rho * self.data.x_norms)[:, None] * ROOM + 1e-300
            ratio = min(ratio, float(((Y - point.c_error[:, None]) / change).min()))
        return ratio

    def stepped(self) -> Place:
        """The exact step, up to the last digits."""
        parts = self.place.parts()
        for part, (A, B) in self.point.gradient().items():
            G = A.T @ B
            scale = self.proof.scales[part]
            size = Digits.of(np.array(self.proof.step_size))
            if scale != 1.0:
                size = size * (Digits.of(np.array(scale)) * Digits.of(np.array(scale)))
            if part in ("w", "v"):
                G = Digits(G.limbs[:, 0, :])
            parts[part] = parts[part] - G * size
        return Place(**parts)


def gram(A: Digits) -> Floats:
    """A A^T, every entry right to 2^-49 of the norms of its rows."""
    return (A @ A.T).floats()


def check_point(proof: StoredProof, check: PointCheck, k: int, away: float, report: Report, *, whole: bool) -> None:
    """Compares the numbers of step k with those found here, `away` from the computed point k.

    Not `whole`: without what takes long, or needs the point itself.
    """
    row = {name: column[k] for name, column in proof.steps.items()}
    at, eta = f"step {k}", proof.step_size
    ball = StoredBall(proof, check.data, check.point, check.omega, row["delta"] + away)
    drift = proof.scales["R"] * away
    most = check.omega + drift + (ABOVE if proof.m < WIDE else ABOVE_WIDE)
    report(
        "omega",
        check.omega_below - drift <= row["omega"] <= most
        and check.omega + proof.scales["R"] * row["delta"] + drift < 1
        and ball.holds,
        f"{at}: {row['omega']:.6g} stored, between {check.omega_below:.6g} and {check.omega:.6g}",
    )
    if not ball.holds:
        return
    L, L_below = math.sqrt(check.J_square) + ball.dJ, math.sqrt(max(0.0, check.J_square_below)) - ball.dJ
    report(
        "jacobian",
        L_below <= row["jacobian"] <= L * (1 + _CLOSE) and eta * L**2 * ROOM <= 2,
        f"{at}: {row['jacobian']:.6g} stored, |J| between {L_below:.6g} and {L:.6g}",
    )
    if whole and row["expansion"] is not None:
        M = check.expansion(ball)
        report("expansion", M <= row["expansion"], f"{at}: {row['expansion']:.4g} stored, at most {M:.4g} found")
    report("loss", loss_agrees(check, row["loss"], away * L), f"{at}: {row['loss']:.10g} stored, {check.loss:.10g} found")
    size = norm(check.point.r.floats())
    least, most = size + L_below * row["delta"] - L * away, size + L * (row["delta"] + away)
    fine = least / ROOM**4 <= row["residual"] <= most * (1 + _CLOSE) + residual_scale(check)
    report("residual", fine, f"{at}: {row['residual']:.8g} stored, between {least:.8g} and {most:.8g} found")
    if proof.smooth or row["mask_ratio"] is None:
        return
    # the ball is about the computed point, whose pre-activations differ from these by less than on a ball of radius `away`
    stored, ratio = row["mask_ratio"], check.mask_ratio(StoredBall(proof, check.data, check.point, row["omega"], row["delta"]))
    fine = abs(stored - ratio) <= _CLOSE * ratio + _ROUNDED + 2 * away / row["delta"] and (ratio > 1 or not whole)
    report("mask", fine, f"{at}: ratio {stored} stored, {ratio:.6g} found")


def loss_agrees(check: PointCheck, stored: float, moved: float = 0.0) -> bool:
    """Whether |r|^2/2 is the stored loss, but for rounding and residuals that moved by this."""
    near = moved + _COMPUTED * math.sqrt(2 * stored) + residual_scale(check)
    return abs(stored - check.loss) <= (2 * norm(check.point.r.floats()) + moved) * near


def residual_scale(check: PointCheck) -> float:
    """How far computed residuals may be off: 1e-13 of the sizes of their terms, and 1e-17 where
    equilibria are stored in twice the precision, but for what the check cannot resolve."""
    point = check.point
    z = row_norms(point.Z.floats()) + math.sqrt(check.proof.m) * check.proof.shift
    terms = z * norm(check.place.w.floats()) + np.abs(check.data.y.floats())
    if check.place.v is not None:
        terms = terms + row_norms(point.C.floats()) * norm(check.place.v.floats())
    return (1e-13 if check.proof.smooth else 1e-17) * norm(terms) + norm(point.r_error)


def check_values(proof: StoredProof, check: PointCheck, k: int, report: Report) -> None:
    """The stored values of checkpoint k, also those that its gradient does not need."""
    for name in "ZPrQC" if proof.rectified else "ZPr":
        exact: Digits = getattr(check.point, name)
        off = np.abs((exact - stored_values(proof, k, name, *exact.shape)).floats()).max()
        near = _COMPUTED * np.abs(exact.floats()).max() + 1e-13 * proof.shift + 4 * LOST
        near += residual_scale(check) if name == "r" else 0.0
        report("equilibria", off <= near, f"point {k}: {name} is off by {off:.3g}")


def check_gradient(proof: StoredProof, check: PointCheck, k: int, report: Report) -> None:
    """eta |J^T r - G| against eps_k, where G is made of the stored Z, P, Q, C, r."""
    weights = stored_values(proof, k, "r", proof.n).as_column()
    sizes = []
    for part, (A, B) in check.point.gradient().items():
        left, right = _stored_factors(proof, k, part)
        A0 = weights if left is None else left * weights
        B0 = check.data.X if right is None else right
        # A^T B - A0^T B0 = (A - A0)^T B + A0^T (B - B0): small differences, known to 15 digits
        off = (A - A0).floats().T @ B.floats() + A0.floats().T @ (B - B0).floats()
        sizes.append(proof.scales[part] * norm(off) * (1 + 1e-9))
    last = check.point.gradient_error() + entries(proof) * 4 * LOST
    found, stored = math.hypot(*sizes) + last, proof.steps["error"][k] / proof.step_size
    if last > stored / 2:
        raise proof.damaged(
            f"its gradient at step {k} is claimed to be known to {stored:.3g}, and the check has numbers to {last:.3g} only; "
            "prove it for larger data"
        )
    report("gradient", found <= stored / ROOM, f"step {k}: {stored:.4g} stored, {found:.4g} found")


def _stored_factors(proof: StoredProof, k: int, part: str) -> tuple[Digits | None, Digits | None]:
    """The stored factors of the gradient of a part; None for the weights r, or for X."""

    def values(name: str) -> Digits:
        return stored_values(proof, k, name, proof.n, proof.m)

    if part in ("w", "v"):
        return None, values("Z" if part == "w" else "C")
    return (values("P"), values("Z")) if part == "R" else (values("Q" if proof.rectified else "P"), None)


def check_segment(proof: StoredProof, data: Data, first: int, last: int, report: Report, done: Callable[[int], None]) -> None:
    """Steps first, ..., last - 1 from a checkpoint on, in more digits; and `last` if it is one."""
    place, eta = stored_place(proof, first), proof.step_size
    smallest = min(scale for scale in proof.scales.values() if scale > 0)
    lost = math.sqrt(entries(proof)) * 8 * LOST / smallest  # of a step, and of reading the point
    Z, P = (proof.tensor(f"checkpoint.{first}.{name}", proof.n, proof.m) for name in "ZP")
    away = lost
    for k in range(first, last):
        check = PointCheck(proof, data, place, (Z, P))
        if k == first:
            check_gradient(proof, check, k, report)
            check_values(proof, check, k, report)
        check_point(proof, check, k, away, report, whole=k == first)
        M, error = proof.steps["expansion"][k], proof.steps["error"][k]
        if M is None:  # delta_k = 0: the step is the first, and begins at the start itself
            M = check.expansion(StoredBall(proof, data, check.point, check.omega, away))
        away = ((1 + eta * M) * away + error + lost + eta * check.point.gradient_error()) * ROOM
        done(k)
        if last in proof.checkpoints:
            place, Z, P = check.stepped(), check.point.Z.floats(), check.point.P.floats()
    if last in proof.checkpoints:
        distance = distance_between(proof, place, stored_place(proof, last))
        report(
            "error", distance <= away, f"steps {first} to {last}: {distance:.4g} from the computed point, {away:.4g} allowed"
        )
