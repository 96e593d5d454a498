r"""The end of a proof for ReLU: from here on descent converges, although units switch (Theorem B).

A step is r' = r - eta S J^T r, where J is the Jacobian at its start and S its secant. With N = (S +
J)/2 and F = (S - J)/2,

    S J^T = N N^T + (F N^T - N F^T) - F F^T,

whose bracket is skew: r does not feel it at first order. Suppose that in the ball of radius R about
the exact iterate K all N have singular values in [s, L], |F| <= f and |N F^T| + |F F^T| <= e0. Let
x = |N^T r|/|r|. As lambda^2 <= (s^2 + L^2) lambda - s^2 L^2 on [s^2, L^2],

    |(I - eta N N^T) r|^2 <= |r|^2 (1 - 2 eta (A1 x^2 + A2)),  |N N^T r| <= h |r|,
    A1 = 1 - eta (s^2 + L^2)/2,   A2 = eta s^2 L^2/2,   h^2 = (s^2 + L^2)(x^2 - s^2) + s^4,

and therefore, with E = f x + e0,

    |r'| <= |r| (1 - eta gain(x)),    gain = A1 x^2 + A2 - f^2 - eta h E - eta E^2/2.

A step is at most eta (x + f) |r| long. If gain >= kappa (x + f) for all x in [s, L] with kappa > 0,
and kappa eta (L + f) <= 1, R >= |r_K|/kappa, then |r| falls by kappa times the length of every
step, so the path is at most |r_K|/kappa long, the ball is never left, and |r| falls by the factor 1
- eta kappa (s + f) a step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from wellposed.linalg import least_eigenvalue_lower
from wellposed.linalg.directed import rate_after
from wellposed.linalg.verified_cholesky import norm_upper_by_test
from wellposed.prove._contraction import Contraction
from wellposed.prove._jacobian import Ball, Jacobian, top_eigenvalue
from wellposed.prove._point import Point
from wellposed.prove._problem import Problem
from wellposed.prove._shadow import mask_ratio
from wellposed.prove._switches import MOST_PART, MOST_SWITCHES, Centre, Pairs, pairs_in, within_slopes
from wellposed.prove.error_free import SLACK, gamma, norm_up, rows_up

_ROUNDS = 40
#: The part of all pairs that may switch where the theorem mostly begins to hold: for predictions only.
_USUAL = 0.01
#: A radius that has become so many times |r|/s will not settle.
_MOST_GROWTH = 30.0
_CELLS = 4000
#: Most switches for which the norm of their whole Gram matrix is computed.
_GRAM = 800


@dataclass(frozen=True)
class Tail:
    """What the theorem was found to say: `numbers` of a tail that holds, or why it does not.

    `shortfall` is a guess of how many times too large something is; it only serves predictions.
    """

    holds: bool
    reason: str = ""
    radius: float = math.inf
    rate: float = 1.0
    numbers: dict[str, float] = field(default_factory=dict)
    shortfall: float | None = None


def tail(problem: Problem, point: Point, jacobian: Jacobian, contraction: Contraction, step_size: float, delta: float) -> Tail:
    """Theorem B at this point, whose distance to the exact iterate is at most delta.

    The least radius is found from below: R <- e/kappa(R) until it no longer grows.
    """
    near = jacobian.ball(delta)
    h0 = jacobian.least_eigenvalue()
    if near is None or not h0 > 0:
        return Tail(False, f"the least eigenvalue of the tangent kernel is only known to be at least {h0:.3g}")
    ratio, _ = mask_ratio(problem, point, near)
    if ratio is not None and not ratio > 1:  # |J| would not bound how r changes in the ball of radius delta
        return Tail(False, f"a pre-activation may be 0 within delta: its ratio is {ratio:.3g}")
    e = (norm_up(point.r) + near.dr) * SLACK
    radius = e / math.sqrt(h0)
    most = min(MOST_SWITCHES, max(24, int(MOST_PART * point.Z.numel())))
    shortfall = 0.0
    wide: tuple[Pairs, Centre] | None = None
    known: tuple[Pairs, Centre, _Kernel] | None = None
    for _ in range(_ROUNDS):
        ball = jacobian.ball(radius + delta)
        if ball is None:
            return Tail(False, f"the contraction may be lost within the radius {radius:.3g}")
        pairs = pairs_in(problem, point, ball)
        shortfall = shortfall or pairs.count / (_USUAL * point.Z.numel())
        if pairs.count > most:
            return Tail(False, f"{pairs.count} units may switch within the radius {radius:.3g}", shortfall=shortfall)
        ball = within_slopes(problem, point, contraction, ball, pairs)
        pairs = pairs_in(problem, point, ball)
        if wide is None or not pairs.same(wide[0]):
            wide = pairs, Centre(problem, point, contraction, pairs)
        pairs = wide[1].fewer(problem, point, ball)
        if known is None or not pairs.same(known[0]):
            centre = Centre(problem, point, contraction, pairs)
            known = pairs, centre, _Kernel(problem, point, jacobian, centre)
        bounds = known[2].bounds(ball)
        if isinstance(bounds, str):
            return Tail(False, bounds)
        s, L, f, e0 = bounds
        numbers = {"residual": e, "s": s, "L": L, "f": f, "e0": e0, "switches": pairs.count, "omega": contraction.omega}
        kappa = least_gain(step_size, s, L, f, e0)
        if not kappa > 0:
            return Tail(
                False,
                f"kappa = {kappa:.3g} with s = {s:.3g}, f = {f:.3g} and {pairs.count} units that may switch",
                numbers=numbers,
            )
        if not kappa * step_size * (L + f) * SLACK <= 1:
            return Tail(
                False, f"the step size is too large: kappa eta (L + f) = {kappa * step_size * (L + f):.3g}", numbers=numbers
            )
        need = e / kappa * SLACK
        if need <= radius:
            rate = rate_after(step_size * kappa * (s + f) / SLACK)
            return Tail(True, "", radius, rate, numbers | {"kappa": kappa}) if rate < 1 else Tail(False, "no decrease is left")
        radius = need * 1.02
        if radius > _MOST_GROWTH * e / math.sqrt(h0):
            return Tail(False, f"the radius must be beyond {radius:.3g}, where {pairs.count} units may switch", numbers=numbers)
    return Tail(False, f"the radius does not settle; it has reached {radius:.3g}", numbers=numbers)


def least_gain(eta: float, s: float, L: float, f: float, e0: float) -> float:
    """kappa: a lower bound of gain(x)/(x + f) over [s, L], cell by cell of a grid."""
    if not 0 < s <= L or not math.isfinite(L + f + e0):
        return -math.inf
    span = max(L * L - s * s, 1e-12 * s * s) * SLACK
    squares = torch.cat(
        [
            torch.zeros(1, dtype=torch.float64),
            torch.logspace(math.log10(1e-6 * min(s * s, span)), math.log10(span), _CELLS, dtype=torch.float64),
        ]
    )
    squares[-1] = span * SLACK
    x = (s * s + squares).sqrt()
    low, high = x[:-1] / SLACK, x[1:] * SLACK
    t = eta * L * L
    A1, A2 = 1 - t / 2 - eta * s * s / 2, t * s * s / 2
    h = ((s * s + L * L) * (high.square() - s * s) + s**4).clamp(min=0.0).sqrt()
    E = f * high + e0
    grow = A1 * (low if A1 >= 0 else high).square() + A2
    fall = f * f + eta * h * E + eta / 2 * E.square()
    gain = grow - fall - (grow.abs() + abs(A2) + t * high.square() + fall) * (SLACK - 1)
    least = float((gain / torch.where(gain > 0, high + f, low + f)).min())
    return least - abs(least) * (SLACK - 1)


class _Kernel:
    """The Jacobian with slopes 1/2 at the pairs that may switch, and all norms of the switches.

    With beta_u(j) the product of switch u with row j of J, and |phi| <= phi' the sizes of the
    switches, the matrix Phi = sum_u phi_u e_i(u) (switch u) has

        |Phi projected on the rows of J| = |sum_u phi_u e_i(u) (H^-1/2 beta_u)^T|,  |Phi J^T| = |sum_u phi_u e_i(u) beta_u^T|.
    """

    def __init__(self, problem: Problem, point: Point, jacobian: Jacobian, centre: Centre) -> None:
        self.problem, self.point, self.jacobian, self.centre = problem, point, jacobian, centre
        k, ell = problem.k, problem.ell
        P, Q, Z, C = centre.P, centre.Q, point.Z, point.C
        ZZ, XX = jacobian.ZZ, problem.XX
        m = Z.shape[1]
        H = k * k * (P @ P.T) * ZZ + ell * ell * (Q @ Q.T) * XX
        p, q = rows_up(P), rows_up(Q)
        squares = (k * p * point.z_norm).square() + (ell * q * problem.x_norms).square()
        if problem.trains_w:
            H, squares = H + ZZ, squares + point.z_norm.square()
        if problem.trains_v:
            H, squares = H + C @ C.T, squares + point.c_norm.square()
        self.row = squares.sqrt() * SLACK
        forming = 3 * gamma(m + problem.d) * float(squares.sum()) * SLACK
        H = (H + H.T) / 2
        self.h_least = least_eigenvalue_lower(H) - forming
        self.L = math.sqrt(top_eigenvalue(H) + forming) * SLACK
        i = centre.sample
        self.n, self.E = problem.n, len(i)
        if not self.E or not self.h_least > 0:
            return
        # H^-1/2 as K, which need not be exact: |B H^-1/2| <= |B K|/sqrt(lambda_min(K^T H K))
        values, vectors = torch.linalg.eigh(H)
        K = vectors / values.clamp(min=self.h_least).sqrt() @ vectors.T
        size = norm_up(K) ** 2
        KHK = K.T @ H @ K
        least = least_eigenvalue_lower((KHK + KHK.T) / 2) - size * (forming + 16 * gamma(self.n) * norm_up(H))
        left_A, left_U = centre.left_A, centre.left_U
        self.beta = k * k * (left_A @ P.T) * ZZ[i] + ell * ell * (left_U @ Q.T) * XX[i]
        a, u = rows_up(left_A), rows_up(left_U)
        self.size = torch.hypot(k * a * point.z_norm[i], ell * u * problem.x_norms[i]) * SLACK  # |switch u|
        # rounding of beta: 3 gamma |switch u| |row j|
        error = 3 * gamma(m + problem.d) * self.size.unsqueeze(1) * self.row
        self.beta_up = (self.beta.abs() + error) * SLACK
        self.hat = self.beta @ K
        self.hat_error = (rows_up(error) * math.sqrt(size) + 3 * gamma(self.n) * rows_up(self.beta) * math.sqrt(size)) * SLACK
        self.hat_norm = rows_up(self.hat) + self.hat_error + 1e-300
        self.hat_scale = 1 / math.sqrt(least) * SLACK if least > 0 else math.inf
        gram = k * k * (left_A @ left_A.T) * ZZ[i][:, i] + ell * ell * (left_U @ left_U.T) * XX[i][:, i]
        self.gram, self.gram_error = gram, 3 * gamma(m + problem.d) * self.size.unsqueeze(1) * self.size

    def bounds(self, ball: Ball) -> tuple[float, float, float, float] | str:
        """s, L, f, e0 in the ball, or why there are none."""
        problem, point, centre, jacobian = self.problem, self.point, self.centre, self.jacobian
        k, ell = problem.k, problem.ell
        if not self.h_least > 0:
            return f"with slopes 1/2 at {self.E} units the kernel is only known to have eigenvalues >= {self.h_least:.3g}"
        found = centre.sizes(problem, point, ball)
        if found is None:
            return f"{self.E} units that may switch amplify each other"
        phi, smooth, y = found
        projected, B, F2, inexact = self._switches(phi, ball) if self.E else (0.0, 0.0, 0.0, 0.0)
        fl = math.sqrt(F2) * SLACK
        # rows (dz, dc, k (pi (x) dz + smooth (x) z), l (smooth + dv) (x) x), and what the computed p, q, z, c lack
        pi = (centre.p_norm + smooth + y) * SLACK
        q_smooth = smooth + (ball.radius if problem.trains_v else 0.0)
        dp, dq = smooth + centre.p_error, q_smooth + centre.q_error
        rows = (k * (pi * ball.dz + dp * point.z_norm)).square() + (ell * dq * problem.x_norms).square()
        rows = rows + problem.trains_w * ball.dz.square() + problem.trains_v * ball.dc.square()
        whole = math.sqrt(float(rows.sum()))
        if point.Q is point.P:
            # |dZ|_F <= tau rho |Xi|, as sum_i |dOmega xi_i|^2 <= |Xi|^2: better than row by row
            dZ = ball.tau * ball.radius * (jacobian.Xi + k * norm_up(point.z_error)) + norm_up(point.z_error)
            joint = k * float(pi.max()) * dZ + norm_up(torch.hypot(k * dp * point.z_norm, ell * dq * problem.x_norms))
            whole = min(whole, math.hypot(problem.trains_w * dZ, joint))
        Ds = (whole + inexact) * SLACK
        # F: smooth parts and switches differ between S and J, at the z and c of one point
        moved = torch.hypot(k * smooth * (point.z_norm + ball.dz), ell * q_smooth * problem.x_norms)
        fs = (norm_up(moved) + k * norm_up(y * ball.dz) + inexact) * SLACK
        s0 = math.sqrt(self.h_least) / SLACK
        s = (s0 - (projected + Ds) * SLACK) / SLACK
        if not s > 0:
            return f"s <= {s0:.3g} - {projected:.3g} (of {self.E} units that may switch) - {Ds:.3g} (smooth) is not positive"
        f = (fl + fs) * SLACK
        L = (min(math.sqrt(self.L**2 + 2 * B + F2), self.L + fl) + Ds) * SLACK
        e0 = (B + fl * (fl + Ds) + fs * L + f * f) * SLACK
        return s, L, f, e0

    def _switches(self, phi: Tensor, ball: Ball) -> tuple[float, float, float, float]:
        """Bounds of |Phi projected|, |Phi J^T|, |Phi|^2, and of what the computed switches lack."""
        i, n, point, problem, centre = self.centre.sample, self.n, self.point, self.problem, self.centre

        def by_sample(values: Tensor) -> Tensor:
            return torch.zeros(n, *values.shape[1:], dtype=torch.float64).index_add(0, i, values)

        # |O diag(g)| |diag(phi/g) M| for any g > 0, or the matrix of absolute values
        g = (phi * self.hat_norm).sqrt()
        weight = (phi / g).unsqueeze(1)
        scaled = norm_upper_by_test(weight * self.hat) + norm_up(weight.squeeze(1) * self.hat_error)
        one = math.sqrt(float(by_sample(phi * self.hat_norm).max())) * scaled
        two = nonnegative_norm(by_sample(phi.unsqueeze(1) * (self.hat.abs() + self.hat_error.unsqueeze(1))))
        projected = min(one, two) * self.hat_scale * SLACK
        sizes = rows_up(self.beta_up) + 1e-300
        weight = (phi / sizes).sqrt().unsqueeze(1)  # phi/g for g^2 = phi |beta|
        scaled = norm_upper_by_test(weight * self.beta) + norm_up(weight * (self.beta_up - self.beta.abs()))
        one = math.sqrt(float(by_sample(phi * sizes).max())) * scaled
        B = min(one, nonnegative_norm(by_sample(phi.unsqueeze(1) * self.beta_up))) * SLACK
        absolute = (self.gram.abs() + self.gram_error) * phi.unsqueeze(1) * phi
        F2 = nonnegative_norm(by_sample(by_sample(absolute).T.contiguous()))
        if self.E <= _GRAM:
            g = phi * self.size + 1e-300
            k = phi / g.sqrt()
            top = top_eigenvalue(k.unsqueeze(1) * self.gram * k) + norm_up(k.unsqueeze(1) * self.gram_error * k)
            F2 = min(F2, float(by_sample(g).max()) * max(0.0, top) * SLACK)
        lam = rows_up(centre.left_A)
        z_part = problem.k * (centre.lambda_error * point.z_norm[i] + lam * point.z_error[i])
        lacks = phi * torch.hypot(z_part, problem.ell * centre.lambda_error * problem.x_norms[i])
        return projected, B, F2 * SLACK, norm_up(by_sample(lacks))


def nonnegative_norm(A: Tensor) -> float:
    """Upper bound of |A| for a matrix with entries >= 0: max_i (A^T A x)_i/x_i for a positive x
    (Collatz)."""
    x = torch.ones(A.shape[1], dtype=torch.float64)
    best = math.inf
    for _ in range(30):
        y = A.T @ (A @ x)
        best = min(best, float((y / x).max()))
        x = y / float(y.max()) + 1e-6 if float(y.max()) > 0 else x
    return math.sqrt(best) * (SLACK + gamma(A.shape[0] + A.shape[1]))
