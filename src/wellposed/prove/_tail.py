r"""The end of a proof for ReLU: from here on descent converges, although units switch (Theorem B).

`_gain` has the theorem and its proof. A step is r' = r - eta S J^T r, where J is the Jacobian at
its start and S its secant; N = (S + J)/2 and F = (S - J)/2. This module bounds, in the ball of
radius R about the exact iterate K, the singular values of all N by [s, L], |F| by f, |S F^T| by e0,
and finds g, g0 with |F^T r|^2 <= g |N^T r|^2 + g0 |r|^2 for all r, where they are better than f^2.

The switches of a sample act on its residual alone, so F F^T <= diag(q), where q_i adds up the
switches of sample i. |F| is as large as the largest q_i, but r that hardly falls is an eigenvector
of N N^T that has a part in most samples. So g and g0 come from the largest eigenvalue b of diag(q)
- c H, H the kernel at the centre: |F^T r|^2 <= c |J^T r|^2 + b |r|^2, and |J^T r| <= |N^T r| + d
|r|, where d is what s loses against sigma_min(J).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from wellposed.linalg import least_eigenvalue_lower
from wellposed.linalg.directed import rate_after
from wellposed.linalg.verified_cholesky import norm_upper_by_test
from wellposed.prove._contraction import Contraction
from wellposed.prove._gain import least_gain, nonnegative_norm, tight_gain
from wellposed.prove._jacobian import ParameterBall, PredictionJacobian, top_eigenvalue
from wellposed.prove._point import ComputedPoint
from wellposed.prove._problem import ProvedProblem
from wellposed.prove._shadow import mask_ratio
from wellposed.prove._short import short_down, short_up
from wellposed.prove._switches import MOST_PART, MOST_SWITCHES, Centre, Pairs, pairs_in, within_reach, within_slopes
from wellposed.prove.error_free import SLACK, UNIT, gamma, norm_up, rows_up

_ROUNDS = 40
#: The part of all pairs that may switch where the theorem mostly begins to hold: for predictions only.
_USUAL = 0.01
#: A radius that has become so many times |r|/s will not settle.
_MOST_GROWTH = 30.0
#: Most switches for which the norm of their whole Gram matrix is computed.
_GRAM = 800
#: c that are tried for g and g0.
_SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8)
#: By how much a pair (g, g0) must improve kappa to be taken.
_WORTH = 1e-4


@dataclass(frozen=True)
class Tail:
    """What the theorem was found to say: `numbers` of a tail that holds, or why it does not.

    `shortfall` is a guess of how many times too large something is; it only serves predictions.
    """

    holds: bool
    reason: str = ""
    radius: float = math.inf
    rate: float = 1.0
    numbers: dict[str, Any] = field(default_factory=dict)
    shortfall: float | None = None


def tail(
    problem: ProvedProblem,
    point: ComputedPoint,
    jacobian: PredictionJacobian,
    contraction: Contraction,
    step_size: float,
    delta: float,
) -> Tail:
    """Theorem B at this point, whose distance to the exact iterate is at most delta.

    The least radius is found from below: R <- e/kappa(R) until it no longer grows.
    """
    near = jacobian.ball(delta)
    h0 = jacobian.least_eigenvalue()
    if near is None or not h0 > 0:
        return Tail(False, f"the least eigenvalue of the tangent kernel is only known to be at least {h0:.3g}")
    masks = mask_ratio(problem, point, near)
    if masks is not None and not masks.proved > 1:  # |J| would not bound how r changes in the ball of radius delta
        return Tail(False, f"a pre-activation may be 0 within delta: its ratio is {masks.proved:.3g}")
    e = short_up((norm_up(point.r) + near.dr) * SLACK)
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
        s, L, f, e0, shares = bounds
        s, L, f, e0 = short_down(s), short_up(L), short_up(f), short_up(e0)
        kappa, share = _best_share(step_size, s, L, f, e0, shares)
        numbers: dict[str, Any] = {"residual": e, "s": s, "L": L, "f": f, "e0": e0}
        numbers |= {"g": None, "g0": None} if share is None else {"g": share[0], "g0": share[1]}
        numbers |= {"switches": pairs.count, "omega": short_up(contraction.omega)}
        if not kappa > 0:
            return Tail(
                False,
                f"kappa = {kappa:.3g} with s = {s:.3g}, f = {f:.3g} and {pairs.count} units that may switch",
                numbers=numbers,
                shortfall=1 - kappa / s if math.isfinite(kappa) else None,
            )
        if not kappa * step_size * (L + f) * SLACK <= 1:
            return Tail(
                False, f"the step size is too large: kappa eta (L + f) = {kappa * step_size * (L + f):.3g}", numbers=numbers
            )
        need = e / kappa * SLACK
        if need <= radius:
            # the constants of a ball hold in a smaller one too
            rate = rate_after(step_size * kappa * (s + f) / SLACK)
            numbers |= {"kappa": kappa, "switches": within_reach(problem, point, short_up(contraction.omega), need + delta)}
            return Tail(True, "", need, rate, numbers) if rate < 1 else Tail(False, "no decrease is left")
        radius = need * 1.02
        if radius > _MOST_GROWTH * e / math.sqrt(h0):
            shortfall = radius * math.sqrt(h0) / (_MOST_GROWTH * e)
            reason = f"the radius must be beyond {radius:.3g}, where {pairs.count} units may switch"
            return Tail(False, reason, numbers=numbers, shortfall=shortfall)
    return Tail(False, f"the radius does not settle; it has reached {radius:.3g}", numbers=numbers)


def _best_share(
    eta: float, s: float, L: float, f: float, e0: float, shares: list[tuple[float, float]]
) -> tuple[float, tuple[float, float] | None]:
    """kappa and the (g, g0) that it needs; None if |F| <= f is as good."""
    best, chosen = least_gain(eta, s, L, f, e0), None
    for g, g0 in shares:
        share = short_up(g), short_up(g0)
        kappa = least_gain(eta, s, L, f, e0, *share)
        if kappa > best + _WORTH * abs(best):
            best, chosen = kappa, share
    if not best > 0:
        return best, chosen
    return tight_gain(eta, s, L, f, e0, *(chosen or (0.0, math.inf))), chosen


class _Kernel:
    """The Jacobian with slopes 1/2 at the pairs that may switch, and all norms of the switches.

    With beta_u(j) the product of switch u with row j of J, and |phi| <= phi' the sizes of the
    switches, the matrix Phi = sum_u phi_u e_i(u) (switch u) has

        |Phi projected on the rows of J| = |sum_u phi_u e_i(u) (H^-1/2 beta_u)^T|,  |Phi J^T| = |sum_u phi_u e_i(u) beta_u^T|.
    """

    def __init__(self, problem: ProvedProblem, point: ComputedPoint, jacobian: PredictionJacobian, centre: Centre) -> None:
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
        self.H, self.forming = H, forming
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

    def bounds(self, ball: ParameterBall) -> tuple[float, float, float, float, list[tuple[float, float]]] | str:
        """s, L, f, e0 and some (g, g0) in the ball, or why there are none."""
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
        e0 = (B + fl * (fl + Ds) + fs * L) * SLACK
        return s, L, f, e0, self._shares(phi, fs, s, projected + Ds)

    def _shares(self, phi: Tensor, fs: float, s: float, d: float) -> list[tuple[float, float]]:
        """Some (g, g0), given what F has besides the switches, and |J^T r| <= |N^T r| + d |r|."""
        if not self.E:
            return []
        i, found = self.centre.sample, []
        absolute = (self.gram.abs() + self.gram_error) * phi.unsqueeze(1) * phi
        # entries of |F F^T|, symmetric: r^T A r <= sum_i r_i^2 (A x)_i/x_i for every x > 0
        A = _by_sample(_by_sample(absolute, i, self.n).T.contiguous(), i, self.n)
        A = torch.maximum(A, A.T) * (1 + 4 * gamma(self.E))
        for x in (torch.ones(self.n, dtype=torch.float64), A.sum(dim=1).sqrt() + 1e-6 * math.sqrt(float(A.max()))):
            q = A @ x / x * SLACK
            for c in _SHARES:
                S = torch.diag(q) - c * self.H
                b = top_eigenvalue(S) + (c * self.forming + 8 * UNIT * (norm_up(q) + c * norm_up(self.H))) * SLACK
                # (u + v)^2 <= (1 + t) u^2 + (1 + 1/t) v^2, for |F^T r| and for x + d at x = s
                t = fs / math.sqrt(max(c * (s + d) ** 2 + b, 1e-6 * float(q.max())))
                g = (1 + t) * c * (1 + d / s)
                parts = [(1 + t) * b, (1 + t) * c * d * (d + s), fs * fs + (fs * fs / t if t else 0.0)]
                found.append((g * SLACK, sum(parts) + sum(map(abs, parts)) * (SLACK - 1)))
        return found

    def _switches(self, phi: Tensor, ball: ParameterBall) -> tuple[float, float, float, float]:
        """Bounds of |Phi projected|, |Phi J^T|, |Phi|^2, and of what the computed switches lack."""
        i, n, point, problem, centre = self.centre.sample, self.n, self.point, self.problem, self.centre

        def by_sample(values: Tensor) -> Tensor:
            return _by_sample(values, i, n)

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


def _by_sample(values: Tensor, sample: Tensor, n: int) -> Tensor:
    """Sums of the rows of each sample."""
    return torch.zeros(n, *values.shape[1:], dtype=torch.float64).index_add(0, sample, values)
