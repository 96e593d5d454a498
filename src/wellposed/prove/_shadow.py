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
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

from wellposed.prove._contraction import Contraction
from wellposed.prove._expansion import around, expansion
from wellposed.prove._explicit import MOST_NUMBERS
from wellposed.prove._jacobian import ParameterBall, PredictionJacobian
from wellposed.prove._point import ComputedPoint
from wellposed.prove._problem import Exact, Parameters, ProvedProblem
from wellposed.prove._resolvent import SampleNorms
from wellposed.prove._short import short_down, short_up
from wellposed.prove.error_free import SLACK, UNIT, norm_up, outer_sum, two_product

#: How much of log(1 + eta M), added up, old norms of samples may cost before they are renewed.
_LOST = 0.2
#: Growth in a step, 1 + eta M, above which M is bounded by explicit T_i, about as long as the step itself takes.
_WORTH = 1e-3


@dataclass(frozen=True)
class Row:
    """The numbers of one step: the columns of `steps` in `format`."""

    delta: float
    loss: float
    expansion: float | None
    jacobian: float
    omega: float
    error: float
    mask_ratio: float | None
    residual: float


class StepRefused(Exception):
    """A hypothesis of Theorem A does not hold at this step; the text says which."""


def shadow_step(
    problem: ProvedProblem,
    point: ComputedPoint,
    jacobian: PredictionJacobian,
    contraction: Contraction,
    step_size: float,
    delta: float,
) -> tuple[Parameters, float, Row]:
    """The next point, its delta, and the numbers of the step.

    Raises:
        StepRefused: A hypothesis fails.
    """
    ball = jacobian.ball(delta)
    if ball is None:
        raise StepRefused(f"omega = {contraction.omega:.6g} leaves no room below 1 for a ball of radius {delta:.3g}")
    if not step_size * ball.L**2 * SLACK <= 2 or not step_size * short_up(ball.L) ** 2 * SLACK <= 2:
        raise StepRefused(
            f"the step size times |J|^2 is only known to be at most {step_size * ball.L**2:.6g}, and must be at most 2"
        )
    masks = mask_ratio(problem, point, ball)
    if masks is not None and not masks.proved > 1:
        raise StepRefused(
            f"a pre-activation of {masks.least:.3g} may be 0: it is only {masks.proved:.3g} times as large as its error and "
            f"what delta = {delta:.3g} may change"
        )
    M = _expansion(problem, point, jacobian, contraction, ball, step_size)
    at, error = _advanced(problem, point, jacobian, step_size)
    residual = (norm_up(point.r) + ball.dr) * SLACK
    if not all(map(math.isfinite, (M, error, residual))):
        raise StepRefused("the numbers leave the range of float64")
    M, error = short_up(M), short_up(error)
    following = ((1 + step_size * M) * delta + error) * SLACK
    if not math.isfinite(following):
        raise StepRefused("the numbers leave the range of float64")
    row = Row(
        delta,
        point.loss,
        None if delta == 0 else M,
        short_up(ball.L),
        short_up(contraction.omega),
        error,
        None if masks is None or delta == 0 else short_down(masks.stated),
        short_up(residual),
    )
    return at, following, row


def _expansion(
    problem: ProvedProblem,
    point: ComputedPoint,
    jacobian: PredictionJacobian,
    contraction: Contraction,
    ball: ParameterBall,
    step_size: float,
) -> float:
    """M on the ball; for smooth slopes with norms of single samples, which are proved anew when
    their age has cost `_LOST` of the exponent of growth, and for ReLU with explicit T_i, as long as
    errors grow by more than `_WORTH` in a step."""
    if not problem.slopes.smooth:
        M, m = expansion(problem, point, jacobian, contraction, ball), point.Z.shape[1]
        fits = problem.n * m * m <= MOST_NUMBERS and not problem.rectified
        if ball.radius > 0 and fits and step_size * M > _WORTH:
            contraction.explicit.follow(point.at.R, point.D)
            M = min(M, expansion(problem, point, jacobian, contraction, ball, explicit=contraction.explicit))
        return M
    known, here = contraction.resolvents, around(problem, point, contraction, ball)
    if ball.radius == 0:  # nothing can grow
        known.see(here)
        return expansion(problem, point, jacobian, contraction, ball)

    def bound(norms: SampleNorms | None) -> float:
        return expansion(problem, point, jacobian, contraction, ball, norms)

    M = bound(known.carried(here))
    known.lost += step_size * (M - (M / 2 if known.fresh is None else bound(known.fresh)))
    if known.lost > _LOST:
        known.renew(here)
        M = min(M, bound(known.carried(here)))
    return M


class MaskRatio(NamedTuple):
    """Least values over samples and units.

    Attributes:
        proved: Of (|pre-activation| - its error)/(its change on the ball): above 1, no slope jumps.
        stated: Of |pre-activation|/(its change on the ball).
        least: Of |pre-activation|.
    """

    proved: float
    stated: float
    least: float


def mask_ratio(problem: ProvedProblem, point: ComputedPoint, ball: ParameterBall) -> MaskRatio | None:
    """By how much masks are unambiguous on the ball; None for smooth slopes.

    A pre-activation changes by at most |dOmega xi_i| + (|R_u| + k rho) |dz_i|; one of c by l rho
    |x_i|.
    """
    if problem.slopes.smooth:
        return None
    rho, k = ball.radius, problem.k
    xi = torch.hypot(k * point.z_norm, problem.ell * problem.x_norms).unsqueeze(1)
    change = rho * xi * (1 + (point.row_R + k * rho) * ball.tau) * SLACK + 1e-300
    found = [_ratios(point.V, point.v_error, change)]
    if problem.rectified and problem.ell:  # where U is fixed, c is too
        change = (problem.ell * rho * problem.x_norms).unsqueeze(1) * SLACK + 1e-300
        found.append(_ratios(point.Y, point.y_error.unsqueeze(1), change))
    return MaskRatio(*map(min, zip(*found, strict=True)))


def _ratios(V: Tensor, error: Tensor, change: Tensor) -> tuple[float, float, float]:
    size = V.abs()
    return float(((size - error) / change).min()), float((size / change).min()), float(size.min())


def _advanced(
    problem: ProvedProblem, point: ComputedPoint, jacobian: PredictionJacobian, step_size: float
) -> tuple[Parameters, float]:
    r"""The next computed point and eps_k.

    The gradient is made of the computed z, p, q, c, r, all as high + low: exact products, and
    rests. J*^T r* - sum_i r_i J_i = J*^T (r* - r) + sum_i r_i (J*_i - J_i), and row i of the last
    bracket is (dz, dc, k (p* (x) dz + dp (x) z), l dq (x) x); products of whole matrices bound the
    sums.
    """
    k, ell, r, fine, lows = problem.k, problem.ell, point.r.abs() + point.lows["r"].abs(), point.fine, point.lows
    error = jacobian.L * norm_up(fine["r"])
    if point.Q is point.P:
        error += (jacobian.Xi + k * norm_up(point.z_error)) * norm_up(r * fine["P"])
    else:
        Z_op = math.sqrt(max(0.0, jacobian.Z_square)) + norm_up(point.z_error)
        error += k * Z_op * norm_up(r * fine["P"]) + ell * norm_up(problem.X) * norm_up(r * fine["Q"])
    error += k * (jacobian.P_op + norm_up(point.p_error)) * norm_up(r * fine["Z"])
    error += problem.trains_w * float((r * fine["Z"]).sum()) + problem.trains_v * float((r * fine["C"]).sum())
    gradient_error = error * SLACK
    none = torch.zeros_like(problem.X)
    factors: dict[str, tuple[str, Tensor | None, Tensor, Tensor]] = {
        "R": ("P", point.P, point.Z, lows["Z"]),
        "U": ("Q", point.Q, problem.X, none),
        "w": ("", None, point.Z, lows["Z"]),
        "v": ("", None, point.C, lows["C"]),
    }
    parts: dict[str, Exact] = {}
    rounding = 0.0
    for part in problem.trained:
        name, left, right, right_low = factors[part]
        # rows r_i p_i, as high + low
        A, A_low = (point.r.unsqueeze(1), lows["r"].unsqueeze(1)) if left is None else two_product(left, point.r.unsqueeze(1))
        scale, forming = problem.scales[part], 0.0
        if left is not None:
            A_low = A_low + (left * lows["r"].unsqueeze(1) + lows[name] * point.r.unsqueeze(1))
            neglected = 4 * UNIT * norm_up(A_low) + norm_up(lows[name] * lows["r"].unsqueeze(1))
            forming = neglected * (norm_up(right) + norm_up(right_low))
        G, rest, product_error = outer_sum(A, A_low, right, right_low)
        # eta k^2 as high + low, times the gradient as high + low
        exact = Fraction(step_size) * Fraction(scale) ** 2
        c = float(exact)
        c_low = float(exact - Fraction(c))
        step, step_low = two_product(G, c)
        terms = norm_up(step_low) + c * norm_up(rest) + abs(c_low) * norm_up(G)
        step_low = step_low + (c * rest + c_low * G)
        shape = point.at.parts()[part].high.shape
        parts[part], updating = point.at.parts()[part].minus(step.reshape(shape), step_low.reshape(shape))
        lost = 4 * UNIT * terms + UNIT**2 * c * norm_up(G) + abs(c_low) * norm_up(rest) + c * (product_error + forming)
        rounding += (lost + updating) / scale
    return point.at.with_parts(parts), (step_size * gradient_error + rounding) * SLACK
