r"""One computed point: equilibria, adjoints and residuals, with bounds of all their errors.

An approximate equilibrium z has the defect g = s(R z + c) - z, which is *measured*, in about twice
the precision. By (1) of `_contraction` the exact one is not farther than

    |z* - z| <= (1 + |R| tau) |g|.                                                               (1)

Likewise |p* - p| <= (1 + |R| tau) |h| for the adjoint p = D (w + R^T p) and its defect h, and tau
|h| for ReLU, where h = D h. How z and p were found does not matter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.prove._contraction import Contraction
from wellposed.prove._problem import Parameters, ProvedProblem
from wellposed.prove.error_free import SLACK, UNIT, gamma, norm_up, rows_up, split, two_sum

_ITERATIONS = 400


@dataclass(frozen=True)
class ComputedPoint:
    """All that is known at the computed parameters. Samples are rows; errors and norms are upper
    bounds.

    Attributes:
        at: The parameters.
        Z, P, Q, C: (n, m) equilibria z (high parts), adjoints p, q = D' (p + v) and c; Q is P where
            c is not rectified.
        r: (n,) residuals. loss: |r|^2/2.
        V, D: (n, m) pre-activations R z + c and slopes. Y, D_c: U x, and the slopes of c.
        adjoint: (n, m) w + R^T p, so that p = D adjoint.
        lows: The low parts of Z, P, Q, C and r, by name: with them they are known better.
        fine: (n,) distances of the sums to the exact values, by name: "Z", "P", "Q", "C", "r".
        z_error, p_error, q_error, c_error, r_error: (n,) distances of the high parts to them.
        v_error: (n, m). y_error: (n,): errors of V and Y. slope_error: of the entries of D.
        z_norm, p_norm, q_norm, c_norm: (n,) of the exact values.
        row_R: (m,) norms of the rows of R.
    """

    at: Parameters
    Z: Tensor
    P: Tensor
    Q: Tensor
    C: Tensor
    r: Tensor
    V: Tensor
    D: Tensor
    Y: Tensor
    D_c: Tensor | None
    adjoint: Tensor
    lows: dict[str, Tensor]
    fine: dict[str, Tensor]
    z_error: Tensor
    p_error: Tensor
    q_error: Tensor
    c_error: Tensor
    r_error: Tensor
    v_error: Tensor
    y_error: Tensor
    slope_error: float
    z_norm: Tensor
    p_norm: Tensor
    q_norm: Tensor
    c_norm: Tensor
    row_R: Tensor

    @property
    def loss(self) -> float:
        """|r|^2/2 of the computed residuals."""
        return float(self.r.square().sum()) / 2


class Evaluator:
    """Computes points; starts at the last ones, on the line through them."""

    def __init__(self, problem: ProvedProblem) -> None:
        self.problem, self.contraction = problem, Contraction(problem.slopes)
        self._z: list[Tensor] = []
        self._p: list[Tensor] = []

    def evaluate(self, at: Parameters) -> ComputedPoint:
        """The point, with errors; `contraction` is updated first and must have omega < 1."""
        problem, slopes, m = self.problem, self.problem.slopes, at.R.high.shape[0]
        bounds = self.contraction
        R = at.R.high
        R1, R2 = split(R, m, common=True)
        rest_R = R2 + at.R.low
        R1_norm, rest_norm, R_frobenius, low_norm = norm_up(R1), norm_up(rest_R), norm_up(R), norm_up(at.R.low)
        Y, Y_low, y_error = self._injection(at)
        D_c = (Y > 0).double() if problem.rectified else None
        C, C_low = (Y, Y_low) if D_c is None else (Y * D_c, Y_low * D_c)

        # equilibria: Picard steps, then corrections of a defect that is known in twice the precision
        RT, RT32 = R.T.contiguous(), R.T.float()
        Z = _predicted(self._z, C)
        for _ in range(_ITERATIONS):
            following = slopes.value(torch.addmm(C, Z, RT))
            change = float(torch.linalg.vector_norm(following - Z))
            Z = following
            if not change > 1e-8 * float(torch.linalg.vector_norm(Z)):
                break
        Z_low = torch.zeros_like(Z)
        for sweep in range(3):
            if sweep < 2:
                Z1, Z2 = split(Z, m)
                exact, rest_high = Z1 @ R1.T, Z2 @ R1.T + Z @ rest_R.T + C_low
            rest = rest_high + Z_low @ RT if sweep else rest_high
            V, low = two_sum(exact, C)
            V, V_low = two_sum(V, low + rest)
            D = slopes.slope(V)
            g = (slopes.value(V) - Z) + (D * V_low - Z_low)
            if sweep == 2 or norm_up(g) <= 3e-17 * float(torch.linalg.vector_norm(Z)):
                break
            found = _corrected(g, D, RT32)
            if sweep == 1:  # Z stays, and with it the exact part of the product
                Z_low = Z_low + found
                continue
            Z, Z_low = two_sum(Z, found)
            if not slopes.smooth:  # equilibria of inactive units are 0, exactly
                off = (D == 0) | (Z < 0)
                Z, Z_low = Z.masked_fill(off, 0.0), Z_low.masked_fill(off, 0.0)
        z, z_low = rows_up(Z), rows_up(Z_low)
        product_error = (
            gamma(m) * (rows_up(Z2) * R1_norm + z * rest_norm + z_low * R_frobenius)
            + z_low * low_norm
            + 8 * UNIT * (rows_up(rest) + rows_up(C_low))
            + 8 * UNIT**2 * rows_up(V)
            + y_error
        ) * SLACK
        # s(V + V_low) = s(V) + s'(V) V_low up to |s''| V_low^2, and the rounding of the defect itself
        value_error = (
            rows_up(slopes.value_error(slopes.value(V)))
            + slopes.most_curvature * rows_up(V_low.square())
            + slopes.slope_error * rows_up(V_low)
        )
        defect = (rows_up(g) + 4 * UNIT * (rows_up(g) + z_low + rows_up(V_low)) + value_error + product_error) * SLACK
        z_error = defect * (1 + bounds.R_norm * bounds.tau) * SLACK
        row_R = rows_up(R) + low_norm
        v_error = (product_error.unsqueeze(1) + row_R * z_error.unsqueeze(1) + V_low.abs()) * SLACK
        slope_error = slopes.slope_error + slopes.most_curvature * float(v_error.max()) * SLACK

        Z, Z_low = two_sum(Z, Z_low)  # the same sum, so that Z alone is as good as a float64 can be
        z, z_low = rows_up(Z), rows_up(Z_low)
        r, r_low, r_error = self._residual(at, Z, Z_low, C, C_low, z_error, y_error)

        # adjoints
        R32 = R.float()
        P = _predicted(self._p, at.w.high.expand_as(Z)) * (1.0 if slopes.smooth else D)
        for _ in range(_ITERATIONS):
            following = D * (at.w.high + P @ R)
            change = float(torch.linalg.vector_norm(following - P))
            P = following
            if not change > 1e-8 * float(torch.linalg.vector_norm(P)):
                break
        for sweep in range(4):
            P1, P2 = split(P, m)
            rest = P2 @ R1 + P @ rest_R + at.w.low
            A, low = two_sum(P1 @ R1, at.w.high.expand_as(P))
            h = D * A - P + D * (low + rest) if slopes.smooth else D * ((A - P) + (low + rest))
            if sweep == 3 or norm_up(h) <= 1.5e-16 * float(torch.linalg.vector_norm(P)):
                break
            P = P + _corrected(h, D, R32)
        p, a, p_rest = rows_up(P), rows_up(A) * SLACK, rows_up(rest)
        rounding = gamma(m) * (rows_up(P2) * R1_norm + p * rest_norm) + 8 * UNIT * (rows_up(h) + p_rest + UNIT * a)
        if slopes.smooth:  # the slopes have errors, and a defect is not a slope times a vector
            rounding = rounding + (slope_error + 4 * UNIT) * (a + p_rest) + 4 * UNIT * p
        P_low = torch.zeros_like(P)
        if not slopes.smooth:  # one correction more, which is measured by the defect that it leaves
            P_low = _corrected(h, D, R32)
            h = (h - P_low) + D * (P_low @ R)
            p_low = rows_up(P_low)
            rounding = rounding + gamma(m) * (p_low * R_frobenius) + p_low * low_norm + 8 * UNIT * p_low
        p_error = (rows_up(h) + rounding) * (1 + bounds.R_norm * bounds.tau if slopes.smooth else bounds.tau) * SLACK
        P, P_low = two_sum(P, P_low)
        Q, Q_low, q_error = P, P_low, p_error
        if D_c is not None:
            Q, Q_low = P * D_c, P_low * D_c
            if at.v is not None:
                Q, Q_low = two_sum(P, at.v.high.expand_as(P))
                Q_low = Q_low + (P_low + at.v.low)
                q_error = (p_error + 2 * UNIT * (rows_up(Q_low) + rows_up(P_low) + norm_up(at.v.low))) * SLACK
                Q, Q_low = Q * D_c, Q_low * D_c
        lows = {"Z": Z_low, "P": P_low, "Q": Q_low, "C": C_low, "r": r_low}
        fine = {"Z": z_error, "P": p_error, "Q": q_error, "C": y_error, "r": r_error}
        p_error, q_error = p_error + rows_up(P_low), q_error + rows_up(Q_low)
        self._z, self._p = [*self._z[-1:], Z], [*self._p[-1:], P]
        return ComputedPoint(
            at=at,
            Z=Z,
            P=P,
            Q=Q,
            C=C,
            r=r,
            V=V,
            D=D,
            Y=Y,
            D_c=D_c,
            adjoint=A + (low + rest),
            lows=lows,
            fine=fine,
            z_error=z_error + z_low,
            p_error=p_error,
            q_error=q_error,
            c_error=y_error + rows_up(C_low),
            r_error=r_error + r_low.abs(),
            v_error=v_error,
            y_error=y_error + rows_up(Y_low),
            slope_error=slope_error,
            z_norm=z + z_error + z_low,
            p_norm=p + p_error,
            q_norm=rows_up(Q) + q_error,
            c_norm=rows_up(C) + y_error + rows_up(C_low),
            row_R=row_R,
        )

    def _injection(self, at: Parameters) -> tuple[Tensor, Tensor, Tensor]:
        """U x as high + low, and the error of the sum, row by row."""
        problem, d = self.problem, self.problem.d
        U1, U2 = split(at.U.high, d)
        rest_U = U2 + at.U.low
        rest = problem.X2 @ U1.T + problem.X @ rest_U.T
        Y, low = two_sum(problem.X1 @ U1.T, rest)
        error = gamma(d) * (rows_up(problem.X2) * norm_up(U1) + problem.x_norms * norm_up(rest_U)) + 4 * UNIT * rows_up(rest)
        return Y, low, error * SLACK

    def _residual(
        self, at: Parameters, Z: Tensor, Z_low: Tensor, C: Tensor, C_low: Tensor, z_error: Tensor, y_error: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """w . z + v . c - y as high + low, and its error."""
        total, rest, error = -self.problem.y, torch.zeros_like(self.problem.y), torch.zeros_like(self.problem.y)
        terms = [(Z, Z_low, at.w, z_error)] + ([(C, C_low, at.v, y_error)] if at.v is not None else [])
        for F, F_low, w, f_error in terms:
            m = F.shape[1]
            F1, F2 = split(F, m)
            w1, w2 = split(w.high.unsqueeze(0), m)
            rest_w = w2 + w.low
            small = (F2 @ w1.T + F @ rest_w.T + F_low @ w.high.unsqueeze(1)).squeeze(1)
            total, low = two_sum(total, (F1 @ w1.T).squeeze(1))
            rest = rest + (low + small)
            f, f_low, w_norm = rows_up(F), rows_up(F_low), norm_up(w.high)
            error = error + gamma(m) * (rows_up(F2) * norm_up(w1) + f * norm_up(rest_w) + f_low * w_norm)
            error = error + f_low * norm_up(w.low) + 8 * UNIT * (small.abs() + low.abs() + rest.abs())
            error = error + (w_norm + norm_up(w.low)) * f_error
        r, r_low = two_sum(total, rest)
        return r, r_low, error * SLACK


def _predicted(last: list[Tensor], zero: Tensor) -> Tensor:
    """On the line through the last two values."""
    if not last:
        return torch.zeros_like(zero)
    return 2 * last[1] - last[0] if len(last) == 2 else last[0]


def _corrected(g: Tensor, D: Tensor, A32: Tensor) -> Tensor:
    """q = g + D (q A), to about six digits, in single precision: a guess, which is measured
    afterwards."""
    scale = float(g.abs().max())
    if not scale > 0:
        return torch.zeros_like(g)
    b, D32 = (g / scale).float(), D.float()
    q = b
    target = 1e-6 * float(torch.linalg.vector_norm(b))
    for _ in range(60):
        following = b + D32 * (q @ A32)
        change = float(torch.linalg.vector_norm(following - q))
        q = following
        if not change > target:
            break
    return q.double() * scale
