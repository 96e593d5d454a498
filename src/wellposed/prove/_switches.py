r"""Which slopes may change in a ball about a computed point, and what that does to the Jacobian.

A pair (sample i, unit u) may switch if its pre-activation can be 0 in the ball. At the centre it is
given the slope 1/2, so that every slope in the ball differs from it by at most 1/2. Let p be the
adjoints at the centre with these slopes D, and pi one with slopes E that are 0 or 1, or a secant's,
at other parameters R', w' of the ball: pi = E (w' + R'^T pi). Then

    pi - p = (I - D R'^T)^-1 [D (dw + dR^T p) + (E - D) a'],     a' = w' + R'^T pi,              (1)

which is a smooth part, of norm at most tau rho sqrt(1 + k^2 |p|^2), and sum_u phi_u lambda'_u over
the pairs that may switch, |phi_u| <= |a'_u|/2. lambda_u = (I - D R^T)^-1 e_u is solved for; that of
R' differs from it by at most tau k rho |lambda_u|. And a'_u is bounded by (1) again:

    |phi_u| <= (|a_u| + rho read_i + k rho y_i + (|R e_u| + k rho) s_i + sum_v |phi_v| |(R^T lambda_v)_u|)/2   (2)

over the v of the same sample; read_i = sqrt(1 + k^2 |p_i|^2), y_i = sum |phi_v| |lambda_v|, and s_i
the smooth part. (2) has the form phi <= b + C phi with b > 0 and C >= 0, so every phi' > 0 with b +
C phi' <= phi' bounds it (then C has a spectral radius below 1).

Pre-activations move by V' - V = (I + R' T') y with |y| <= rho |xi_i|, where T' has the slopes of a
secant, so unit u moves by at most rho |xi_i| |e_u + T'^T R'_u|. A first bound of the last norm is 1
+ |R_u| tau; with it the pairs are found, and then T'^T R'_u is bounded by (1) and (2) with R_u in
the place of w, which leaves fewer pairs.

If c = relu(U x), its units may switch too, and change q = D' (p + v) by |phi_u| <= |(p + v)_u|/2 in
one entry.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from wellposed.prove._contraction import Contraction
from wellposed.prove._jacobian import ParameterBall
from wellposed.prove._point import ComputedPoint
from wellposed.prove._problem import ProvedProblem
from wellposed.prove.error_free import SLACK, UNIT, gamma, norm_up, rows_up

_ITERATIONS = 300
#: Switches that become larger than this amplify each other; adjoints are of the order of 1.
_MOST_SIZE = 1e2
#: More pairs than these, or than this part of all pairs, are not tried.
MOST_SWITCHES, MOST_PART = 2500, 0.15


@dataclass(frozen=True)
class Pairs:
    """The pairs that may switch: (n, m) masks, of z and of c."""

    of_z: Tensor
    of_c: Tensor | None

    @property
    def count(self) -> int:
        """How many."""
        return int(self.of_z.sum()) + (0 if self.of_c is None else int(self.of_c.sum()))

    def same(self, other: Pairs | None) -> bool:
        """Whether the pairs are the same."""
        if other is None or bool((self.of_z != other.of_z).any()):
            return False
        return self.of_c is None or other.of_c is None or not bool((self.of_c != other.of_c).any())


def pairs_in(problem: ProvedProblem, point: ComputedPoint, ball: ParameterBall) -> Pairs:
    """The pairs whose pre-activation can be 0 in the ball."""
    k, rho = problem.k, ball.radius
    xi = torch.hypot(k * point.z_norm, problem.ell * problem.x_norms).unsqueeze(1)
    reach = point.v_error + rho * xi * (1 + (point.row_R + k * rho) * ball.tau) * SLACK
    of_c = None
    if problem.rectified and problem.ell:
        of_c = point.Y.abs() <= ((point.y_error + problem.ell * rho * problem.x_norms) * SLACK).unsqueeze(1)
    return Pairs(point.V.abs() <= reach, of_c)


def within_reach(problem: ProvedProblem, point: ComputedPoint, omega: float, rho: float) -> int:
    """How many pre-activations are so near to 0 that the ball of radius rho could bring them there,
    as `format` counts them: more than those that remain with better bounds."""
    k, x = problem.k, problem.x_norms
    tau = 1 / (1 - omega - k * rho)
    xi = torch.hypot(k * point.z_norm, problem.ell * x).unsqueeze(1)
    count = int((point.V.abs() <= rho * xi * (1 + (point.row_R + k * rho) * tau)).sum())
    if problem.rectified and problem.ell:
        count += int((point.Y.abs() <= (problem.ell * rho * x).unsqueeze(1)).sum())
    return count


def within_slopes(
    problem: ProvedProblem, point: ComputedPoint, contraction: Contraction, ball: ParameterBall, pairs: Pairs
) -> ParameterBall:
    """The ball with a better tau: only units that can be active count in it."""
    D = torch.where(pairs.of_z, 1.0, point.D)
    tau = min(ball.tau, contraction.tau_of_slopes(point.V, D, 0.0, problem.k * ball.radius, renew=False))
    xi = torch.hypot(problem.k * point.z_norm, problem.ell * problem.x_norms)
    return replace(ball, tau=tau, dz=(tau * ball.radius * xi + point.z_error) * SLACK)


class Centre:
    """The point with slopes 1/2 at some pairs: adjoints, and the directions lambda_u of the
    switches.

    Switches of z come first, then those of c. All vectors are the computed ones; their errors are
    in `p_error`, `q_error` and `lambda_error`.

    Attributes:
        P, Q: (n, m) p and q = D' (p + v). A: (n, m) w + R^T p.
        sample, unit: (E,) of each switch. of_z: (E,) whether it is one of z.
        left_A, left_U: (E, m) a switch changes k p_i (x) z_i by phi k left_A (x) z_i and l q_i (x)
            x_i by phi l left_U (x) x_i.
        coupling: (E, E) C of (2) without its factor 1/2; only between switches of one sample.
    """

    def __init__(self, problem: ProvedProblem, point: ComputedPoint, contraction: Contraction, pairs: Pairs) -> None:
        self._pairs = pairs
        at, R = point.at, point.at.R.high
        m, tau = R.shape[0], contraction.tau
        w, low = at.w.high, norm_up(at.R.low)
        R_frobenius = norm_up(R)
        D = torch.where(pairs.of_z, 0.5, point.D)
        P = point.P
        for _ in range(_ITERATIONS):
            following = D * (w + P @ R)
            change = float(torch.linalg.vector_norm(following - P))
            P = following
            if not change > 1e-14 * float(torch.linalg.vector_norm(P)):
                break
        A = w + P @ R
        p = rows_up(P)
        rounding = (gamma(m) * (R_frobenius * p + norm_up(w)) + low * p + norm_up(at.w.low)) * SLACK
        # the defect D (..) - P is bounded as a whole: it is not D times a vector
        factor = (1 + contraction.R_norm * tau) * SLACK
        self.p_error = (rows_up(D * A - P) + 2 * UNIT * p + rounding) * factor
        self.A, self.a_error = A, (rounding + contraction.R_norm * self.p_error) * SLACK
        self.P, self.p_norm = P, p + self.p_error
        self.Q, self.q_error = P, self.p_error
        if point.D_c is not None:
            D_c = torch.where(pairs.of_c, 0.5, point.D_c) if pairs.of_c is not None else point.D_c
            read = P if at.v is None else P + at.v.high
            self.Q = D_c * read
            self.q_error = self.p_error + (0.0 if at.v is None else norm_up(at.v.low)) + 4 * UNIT * rows_up(read)
        self._solve(point, contraction, pairs, D, R_frobenius, low, factor)
        if point.D_c is not None and pairs.of_c is not None:
            self._add_switches_of_c(pairs.of_c, D_c, read)

    def _solve(
        self,
        point: ComputedPoint,
        contraction: Contraction,
        pairs: Pairs,
        D: Tensor,
        R_frobenius: float,
        low: float,
        factor: float,
    ) -> None:
        """lambda_u = e_u + D R^T lambda_u for every switch of z."""
        R, m = point.at.R.high, D.shape[1]
        sample, unit = pairs.of_z.nonzero(as_tuple=True)
        E = len(sample)
        start = torch.zeros(E, m, dtype=torch.float64)
        start[torch.arange(E), unit] = 1.0
        slopes, lam = D[sample], torch.zeros_like(start)
        for i in sample.unique().tolist():
            # units without slope stay 0, and those that may switch have one
            active, chosen = D[i].nonzero().squeeze(1), sample == i
            A = torch.eye(len(active), dtype=torch.float64) - D[i][active].unsqueeze(1) * R[active][:, active].T
            rows = torch.zeros(int(chosen.sum()), m, dtype=torch.float64)
            rows[:, active] = torch.linalg.solve(A, start[chosen][:, active].T).T
            lam[chosen] = rows
        RL = lam @ R
        size = rows_up(lam)
        rounding = (gamma(m) * R_frobenius + low) * size * SLACK
        self.lambda_error = (rows_up(start + slopes * RL - lam) + 4 * UNIT * (size + 1) + rounding) * factor
        self.sample, self.unit, self.of_z = sample, unit, torch.ones(E, dtype=torch.bool)
        self.left_A = self.left_U = lam
        same = sample.unsqueeze(1) == sample
        self._RL, self._RL_error = RL, (rounding + contraction.R_norm * self.lambda_error) * SLACK
        # entry (u, v): (R^T lambda_v)_u
        self.coupling = torch.where(same, RL[:, unit].T.abs() + self._RL_error, 0.0) * SLACK
        self.strength = (self.A[sample, unit].abs() + self.a_error[sample]) * SLACK

    def _add_switches_of_c(self, of_c: Tensor, D_c: Tensor, read: Tensor) -> None:
        """Switches of c: (2) is |phi_u| <= (|(p + v)_u| + |dp_u| + |dv_u|)/2."""
        sample, unit = of_c.nonzero(as_tuple=True)
        E, old = len(sample), len(self.sample)
        lam, m = self.left_A, of_c.shape[1]
        units = torch.zeros(E, m, dtype=torch.float64)
        units[torch.arange(E), unit] = 1.0
        same = sample.unsqueeze(1) == self.sample
        coupling = torch.zeros(old + E, old + E, dtype=torch.float64)
        coupling[:old, :old] = self.coupling
        coupling[old:, :old] = torch.where(same, lam[:, unit].T.abs() + self.lambda_error, 0.0) * SLACK
        self.coupling = coupling
        self.left_U = torch.cat([lam * D_c[self.sample], units])
        self.left_A = torch.cat([lam, torch.zeros(E, m, dtype=torch.float64)])
        self.lambda_error = torch.cat([self.lambda_error, torch.zeros(E, dtype=torch.float64)])
        self.strength = torch.cat([self.strength, (read[sample, unit].abs() + self.q_error[sample]) * SLACK])
        self.of_z = torch.cat([self.of_z, torch.zeros(E, dtype=torch.bool)])
        self.sample, self.unit = torch.cat([self.sample, sample]), torch.cat([self.unit, unit])

    def fewer(self, problem: ProvedProblem, point: ComputedPoint, ball: ParameterBall) -> Pairs:
        """The pairs that remain with sharper bounds of how far their pre-activations move."""
        z = self.of_z
        i, unit, lam_error = self.sample[z], self.unit[z], self.lambda_error[z]
        E, R, k, rho, tau = len(i), point.at.R.high, problem.k, ball.radius, ball.tau
        if not E:
            return self._pairs
        # T^T R_u = lambda_u - e_u, and R_u + R^T T^T R_u = R^T lambda_u
        A, lam = self._RL, rows_up(self.left_A[z]) + lam_error
        P = self.left_A[z].clone()
        P[torch.arange(E), unit] -= 1.0
        p = rows_up(P)
        size = p + 2 * UNIT * (p + 1) + lam_error
        smooth = tau * k * rho * (1 + size) * SLACK
        column = norm_up_columns(R)[unit] + norm_up(point.at.R.low)
        error_a = self._RL_error + k * rho * (1 + size)
        spread = torch.zeros(E, dtype=torch.float64)
        for sample in i.unique():
            b = (i == sample).nonzero().squeeze(1)
            # entry (u, v): the size phi_v of the switch v in T'^T R'_u
            first = A[b][:, unit[b]].abs() + error_a[b].unsqueeze(1)
            coupling, phi = self.coupling[b][:, b], first / 2 + 1e-300
            for _ in range(_ITERATIONS):
                y = (phi * lam[b]).sum(dim=1)
                s = smooth[b] + tau * k * rho * y
                extra = (k * rho * y).unsqueeze(1) + (column[b] + k * rho) * s.unsqueeze(1)
                following = (first + extra + phi @ coupling.T) / 2 * SLACK + 1e-300
                if bool((following <= phi).all()):
                    break
                phi = following * (1 + 1e-9)
                if not float(phi.max()) < _MOST_SIZE:
                    return self._pairs
            else:
                return self._pairs
            spread[b] = s + y
        amplification = (lam + spread) * SLACK
        xi = torch.hypot(k * point.z_norm, problem.ell * problem.x_norms)[i]
        stays = point.V[i, unit].abs() <= (point.v_error[i, unit] + rho * xi * amplification) * SLACK
        of_z = self._pairs.of_z.clone()
        of_z[i, unit] = stays
        return Pairs(of_z, self._pairs.of_c)

    def sizes(self, problem: ProvedProblem, point: ComputedPoint, ball: ParameterBall) -> tuple[Tensor, Tensor, Tensor] | None:
        """phi (E,) of (2), and for each sample the smooth part of (1) and y; None if switches
        amplify each other."""
        k, rho, tau, n = problem.k, ball.radius, ball.tau, problem.n
        read = torch.hypot(torch.full_like(self.p_norm, problem.trains_w), k * self.p_norm)
        smooth = tau * rho * read * SLACK
        lam = (rows_up(self.left_A) + self.lambda_error) * self.of_z
        i = self.sample
        column = norm_up_columns(point.at.R.high)[self.unit] + norm_up(point.at.R.low)
        phi = self.strength / 2 + 1e-300
        for _ in range(_ITERATIONS):
            y = torch.zeros(n, dtype=torch.float64).index_add(0, i, phi * lam) * SLACK
            s = smooth + tau * k * rho * y
            of_z = rho * read[i] + k * rho * y[i] + (column + k * rho) * s[i]
            of_c = s[i] + (rho if problem.trains_v else 0.0)
            following = (self.strength + torch.where(self.of_z, of_z, of_c) + self.coupling @ phi) / 2 * SLACK + 1e-300
            if bool((following <= phi).all()):
                return phi, s, y
            phi = following * (1 + 1e-12)
            if not float(phi.max()) < _MOST_SIZE:
                break
        return None


def norm_up_columns(A: Tensor) -> Tensor:
    """Upper bounds of the norms of the columns."""
    return rows_up(A.T)
