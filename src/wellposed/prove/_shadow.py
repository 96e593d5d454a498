r"""Descent in float64, accompanied by a bound of its distance to exact descent (Theorem A).

Let T be the exact descent map and theta~_k the computed points. Suppose that on the ball of radius
delta_k about theta~_k: omega < 1, no pre-activation is 0, eta |J|^2 <= 2 and |sum r_i Hess f_i| <=
M_k; and |T(theta~_k) - theta~_{k+1}| <= eps_k. Then with

    delta_0 = 0,     delta_{k+1} = (1 + eta M_k) delta_k + eps_k                                 (1)

the exact iterates satisfy |theta_k - theta~_k| <= delta_k. Proof: slopes do not jump on the ball,
which is convex, so there DT = I - eta J^T J - eta sum r_i Hess f_i exists and has a norm of at most
1 + eta M_k, as |I - eta J^T J| <= 1. The mean value theorem bounds |T(theta_k) - T(theta~_k)|.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.prove._contraction import Contraction
from wellposed.prove._expansion import expansion
from wellposed.prove._jacobian import Ball, Jacobian
from wellposed.prove._point import Point
from wellposed.prove._problem import Exact, Parameters, Problem
from wellposed.prove.error_free import SLACK, UNIT, gamma, norm_up, rows_up

#: Samples whose outer products are added before their sum meets the others: less rounding.
_BLOCK = 20


@dataclass(frozen=True)
class Row:
    """The numbers of one step: the columns of `steps` in `format`."""

    delta: float
    loss: float
    expansion: float
    jacobian: float
    omega: float
    gradient_error: float
    error: float
    mask_ratio: float | None
    least: float | None


class Refused(Exception):
    """A hypothesis of Theorem A does not hold at this step; the text says which."""


def shadow_step(
    problem: Problem, point: Point, jacobian: Jacobian, contraction: Contraction, step_size: float, delta: float
) -> tuple[Parameters, float, Row]:
    """The next point, its delta, and the numbers of the step.

    Raises:
        Refused: A hypothesis fails.
    """
    ball = jacobian.ball(delta)
    if ball is None:
        raise Refused(f"omega = {contraction.omega:.6g} leaves no room below 1 for a ball of radius {delta:.3g}")
    if not step_size * ball.L**2 * SLACK <= 2:
        raise Refused(f"the step size times |J|^2 is only known to be at most {step_size * ball.L**2:.6g}, and must be at most 2")
    ratio, least = mask_ratio(problem, point, ball)
    if ratio is not None and not ratio > 1:
        raise Refused(
            f"a pre-activation of {least:.3g} may be 0: it is only {ratio:.3g} times as large as its error and what delta = "
            f"{delta:.3g} may change"
        )
    M = expansion(problem, point, jacobian, contraction, ball)
    at, gradient_error, error = _advanced(problem, point, jacobian, step_size)
    following = ((1 + step_size * M) * delta + error) * SLACK
    if not math.isfinite(following):
        raise Refused("the numbers leave the range of float64")
    row = Row(
        delta,
        point.loss,
        M,
        ball.L,
        contraction.omega,
        gradient_error,
        error,
        None if ratio is None or delta == 0 else ratio,
        least,
    )
    return at, following, row


def mask_ratio(problem: Problem, point: Point, ball: Ball) -> tuple[float | None, float | None]:
    """Least (|pre-activation| - its error)/(its change on the ball), and least |pre-activation|.

    A pre-activation changes by at most |dOmega xi_i| + (|R_u| + k rho) |dz_i|; one of c by l rho
    |x_i|. None for smooth slopes.
    """
    if problem.slopes.smooth:
        return None, None
    rho, k = ball.radius, problem.k
    xi = torch.hypot(k * point.z_norm, problem.l * problem.x_norms).unsqueeze(1)
    change = rho * xi * (1 + (point.row_R + k * rho) * ball.tau) * SLACK + 1e-300
    ratio, least = float(((point.V.abs() - point.v_error) / change).min()), float(point.V.abs().min())
    if problem.rectified and problem.l:  # where U is fixed, c is too
        change = (problem.l * rho * problem.x_norms).unsqueeze(1) * SLACK + 1e-300
        ratio = min(ratio, float(((point.Y.abs() - point.y_error.unsqueeze(1)) / change).min()))
        least = min(least, float(point.Y.abs().min()))
    return ratio, least


def gradient(problem: Problem, point: Point) -> dict[str, Tensor]:
    """The gradient in R, U, w, v, as far as they are trained."""
    found = {}
    Pr, Qr = point.P * point.r.unsqueeze(1), point.Q * point.r.unsqueeze(1)
    for part, left, right in (("R", Pr, point.Z), ("U", Qr, problem.X)):
        if part in problem.trained:
            found[part] = left[:_BLOCK].T @ right[:_BLOCK]
            for j in range(_BLOCK, problem.n, _BLOCK):
                found[part] = found[part] + left[j : j + _BLOCK].T @ right[j : j + _BLOCK]
    if "w" in problem.trained:
        found["w"] = point.Z.T @ point.r
    if "v" in problem.trained:
        found["v"] = point.C.T @ point.r
    return found


def _advanced(problem: Problem, point: Point, jacobian: Jacobian, step_size: float) -> tuple[Parameters, float, float]:
    r"""The next computed point, e_k and eps_k.

    J*^T r* - sum_i r_i J_i = J*^T (r* - r) + sum_i r_i (J*_i - J_i), and row i of the last bracket is
    (dz, dc, k (p* (x) dz + dp (x) z), l dq (x) x); products of whole matrices bound the sums.
    """
    k, l, r = problem.k, problem.l, point.r.abs()
    X_op = norm_up(problem.X)
    error = jacobian.L * norm_up(point.r_error)
    if point.Q is point.P:
        error += jacobian.Xi * norm_up(r * point.p_error)
    else:
        error += k * math.sqrt(max(0.0, jacobian.Z_square)) * norm_up(r * point.p_error) + l * X_op * norm_up(r * point.q_error)
    error += k * (jacobian.P_op + norm_up(point.p_error)) * norm_up(r * point.z_error)
    error += problem.trains_w * float((r * point.z_error).sum()) + problem.trains_v * float((r * point.c_error).sum())
    depth = min(problem.n, _BLOCK) + math.ceil(problem.n / _BLOCK)
    z, p, q = rows_up(point.Z), rows_up(point.P), rows_up(point.Q)
    rounding = gamma(depth) * float((r * torch.hypot(k * p * z, l * q * problem.x_norms)).sum())
    rounding += gamma(problem.n) * float(
        (r * torch.hypot(problem.trains_w * z, problem.trains_v * rows_up(point.C))).sum()
    )
    grads = gradient(problem, point)
    parts: dict[str, Exact] = {}
    size = updating = 0.0
    for part, G in grads.items():
        scale = problem.scales[part]
        size = math.hypot(size, scale * norm_up(G))
        parts[part], low = point.at.parts()[part].minus((step_size * scale * scale) * G)
        updating += low / scale
    gradient_error = error * SLACK
    # the factor eta k^2 has two roundings and its product with the gradient a third
    total = (step_size * (gradient_error + rounding) + 4 * UNIT * step_size * size + updating) * SLACK
    return point.at.with_parts(parts), gradient_error, total
