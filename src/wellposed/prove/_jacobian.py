r"""Norms of the Jacobian and of its parts at a computed point, and how much they change in a ball.

Row i of J is (z_i, c_i, k p_i (x) z_i, l q_i (x) x_i), each part only if its parameter is trained.
xi_i = (k z_i, l x_i), so that a parameter change of norm 1 changes R z_i + c_i by at most |xi_i|.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.linalg import least_eigenvalue_lower
from wellposed.prove._contraction import Contraction
from wellposed.prove._point import ComputedPoint
from wellposed.prove._problem import ProvedProblem
from wellposed.prove._resolvent import SampleNorms
from wellposed.prove.error_free import SLACK, gamma, norm_up


def top_eigenvalue(S: Tensor) -> float:
    """Upper bound of lambda_max of a symmetric matrix."""
    return -least_eigenvalue_lower(-(S + S.T) / 2)


@dataclass(frozen=True)
class ParameterBall:
    """Changes over a ball of some radius about the computed point, errors of the point included.

    Attributes:
        radius: Of the ball.
        tau: >= |(I - D R)^-1 D| for all slopes in the ball. R_norm: >= |R|.
        dz, dp, dq, dc: (n,) |z - Z| and so on, for z at any point of the ball.
        dv: (n,) how far pre-activations move from those at the centre.
        dJ: >= |J - computed J|_F. L: >= |J|. dr: >= |r - computed r|.
    """

    radius: float
    tau: float
    R_norm: float
    dz: Tensor
    dv: Tensor
    dp: Tensor
    dq: Tensor
    dc: Tensor
    dJ: float
    L: float
    dr: float


class PredictionJacobian:
    """Grams of the computed Z, P, Q, X, C, their norms, and balls about the point.

    Attributes:
        gram: (n, n) of the xi_i. H: (n, n) J J^T. PP: (n, n) of the p_i; all up to their rounding.
        Xi: >= |(k Z, l X)|. P_op, Z_op, X_op: >= |P|, |Z|, |X|; all of the computed matrices.
        xi: (n,) >= |xi_i| of the exact values. forming: >= |H - J J^T| for the computed rows.
        L: >= |J|, error: >= |J - computed J|_F, both at the centre.
    """

    def __init__(self, problem: ProvedProblem, point: ComputedPoint, contraction: Contraction) -> None:
        self._problem, self._point = problem, point
        self._omega, self._R_norm = contraction.omega, contraction.R_norm
        k, ell = problem.k, problem.ell
        Z, P, Q, C = point.Z, point.P, point.Q, point.C
        m = Z.shape[1]
        ZZ, self.PP = Z @ Z.T, P @ P.T
        QQ = self.PP if Q is P else Q @ Q.T
        self.ZZ = ZZ
        self.gram = k * k * ZZ + ell * ell * problem.XX
        self.H = k * k * self.PP * ZZ + ell * ell * QQ * problem.XX
        squares = (k * point.p_norm * point.z_norm).square() + (ell * point.q_norm * problem.x_norms).square()
        if problem.trains_w:
            self.H = self.H + ZZ
            squares = squares + point.z_norm.square()
        if problem.trains_v:
            self.H = self.H + C @ C.T
            squares = squares + point.c_norm.square()
        # entry by entry at most 3 gamma |row_i| |row_j|, hence 3 gamma times the trace in the Frobenius norm
        self.gram_error = (
            3 * gamma(m + problem.d) * float(((k * point.z_norm).square() + (ell * problem.x_norms).square()).sum())
        )
        self.ZZ_error = 3 * gamma(m) * float(point.z_norm.square().sum()) * SLACK
        self.Z_square = top_eigenvalue(ZZ) + self.ZZ_error
        self.PP_error = 3 * gamma(m) * float(point.p_norm.square().sum()) * SLACK
        self.forming = 3 * gamma(m + problem.d) * float(squares.sum()) * SLACK
        self.xi = torch.hypot(k * point.z_norm, ell * problem.x_norms) * SLACK
        self.Xi = math.sqrt(top_eigenvalue(self.gram) + self.gram_error) * SLACK
        self.P_op = math.sqrt(top_eigenvalue(self.PP) + self.PP_error) * SLACK
        self.error = self._change(point.z_error, point.p_error, point.q_error, point.c_error)
        self.computed_L = math.sqrt(top_eigenvalue(self.H) + self.forming) * SLACK
        self.L = (self.computed_L + self.error) * SLACK

    def _change(self, dz: Tensor, dp: Tensor, dq: Tensor, dc: Tensor) -> float:
        """Upper bound of |J' - computed J|_F where z, p, q, c change by this much."""
        k, ell, at, problem = self._problem.k, self._problem.ell, self._point, self._problem
        squares = (k * ((at.p_norm + dp) * dz + dp * at.z_norm)).square() + (ell * dq * problem.x_norms).square()
        squares = squares + (dz.square() if problem.trains_w else 0) + (dc.square() if problem.trains_v else 0)
        return math.sqrt(float(squares.sum())) * SLACK

    def least_eigenvalue(self) -> float:
        """Lower bound of lambda_min(J J^T) for the computed rows."""
        return least_eigenvalue_lower((self.H + self.H.T) / 2) - self.forming

    def ball(self, radius: float, norms: SampleNorms | None = None) -> ParameterBall | None:
        r"""Bounds over the ball of this radius, better if norms on it are known; None if the
        contraction is lost.

        The slopes must not jump in it. Where they change smoothly, dD by at most |s''| |dv|,

            p' - p = D' (dw + dR^T p + R'^T (p' - p)) + dD (w + R^T p),     dv = (I - R' D'')^-1 dOmega xi,

        where D'' are the slopes of secants; |(I - R D)^-1| <= 1 + |R| tau.
        """
        problem, at = self._problem, self._point
        room = 1 - self._omega - problem.k * radius
        if not room > 0:
            return None
        tau = SLACK / room
        R_norm = (self._R_norm + problem.k * radius) * SLACK
        K = 1 + R_norm * tau
        if norms is not None:
            tau, K = min(tau, norms.tau), min(K, norms.K)
        dz = tau * radius * self.xi
        dv = K * radius * self.xi * SLACK
        read = torch.hypot(torch.full_like(at.p_norm, problem.trains_w), problem.k * at.p_norm)
        # |dD a| <= |s''| |dv| max_u |a_u|, where the rounding of a is a part of that of p
        adjoint = at.adjoint.abs().amax(dim=1) * SLACK + (R_norm + 2) * at.p_error
        dp = tau * radius * read + K * problem.slopes.most_curvature * dv * adjoint
        dc = problem.ell * radius * problem.x_norms
        dq = dp + (radius if problem.trains_v else 0.0)
        dz, dp, dq, dc = ((a + b) * SLACK for a, b in ((dz, at.z_error), (dp, at.p_error), (dq, at.q_error), (dc, at.c_error)))
        dJ = self._change(dz, dp, dq, dc)
        L = (self.computed_L + dJ) * SLACK
        return ParameterBall(radius, tau, R_norm, dz, dv * SLACK, dp, dq, dc, dJ, L, (norm_up(at.r_error) + L * radius) * SLACK)
