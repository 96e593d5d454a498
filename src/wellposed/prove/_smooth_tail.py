r"""The end of a proof for smooth activations: the Jacobian is Lipschitz (Theorem C).

Suppose |J(theta) - J(theta')| <= Lambda |theta - theta'| and |J| <= L in the ball of radius rho =
delta + R about the computed point K, sigma_min(J) >= s0 at its centre, e >= |r_K|. At a distance l
along the path sigma_min(J) >= s(l) = s0 - Lambda (delta + l), and a secant S of a step has |S - J|
<= Lambda |step|/2. As in Theorem B, with x = |J^T r|/|r| and steps of length eta x |r|,

    |r'| <= |r| - |step| (A1 x + A2/x - eta Lambda L |r|/2),   A1 = 1 - eta (s^2 + L^2)/2,  A2 = eta s^2 L^2/2.

A1 y + A2/y >= c s for all y >= s, where c = 1 - eta s0^2/2 if t = eta L^2 <= 1 - eta s0^2/2, else c
= sqrt(t (2 - t - eta s0^2)). So |r| falls by at least kappa(l) = c s(l) - eta Lambda L e/2 times
the length of a step. kappa decreases in l, so |r_k| <= e - (integral of kappa from 0 to l_k). If
that integral from 0 to R is at least e, then the path never becomes longer than R: a step is at
most

    eta L |r_k| <= eta L (integral of kappa from l_k to R) <= eta L kappa(0) (R - l_k) <= R - l_k.

The rate is 1 - eta kappa(R) s(R).

Lambda: as in `_expansion` with a unit vector in place of r, Lambda <= b + sqrt(b^2 + tau^2 |Xi|^2)
+ max(c_i |xi_i|) |Xi|, b = k tau min(max |p_i| |Xi|, |P| max |xi_i|).
"""

from __future__ import annotations

import math

from wellposed.linalg.directed import rate_after
from wellposed.prove._contraction import Contraction
from wellposed.prove._expansion import curvature_weights
from wellposed.prove._jacobian import Ball, Jacobian
from wellposed.prove._point import Point
from wellposed.prove._problem import Problem
from wellposed.prove._tail import Tail
from wellposed.prove.error_free import SLACK, norm_up

#: Radii are tried from a little above e/s0, the least possible, upwards by this factor: the constants of a small ball are
#: better.
_FIRST, _GROWTH = 1.1, 1.35


def smooth_tail(
    problem: Problem, point: Point, jacobian: Jacobian, contraction: Contraction, step_size: float, delta: float
) -> Tail:
    """Theorem C at this point, whose distance to the exact iterate is at most delta."""
    least = jacobian.least_eigenvalue()
    near = jacobian.ball(delta)
    s0 = math.sqrt(max(0.0, least)) / SLACK - jacobian.error * SLACK
    if near is None or not s0 > 0:
        return Tail(False, f"the least eigenvalue of the tangent kernel is only known to be at least {least:.3g}")
    e = (norm_up(point.r) + near.dr) * SLACK
    reason = ""
    first = lipschitz(problem, point, jacobian, contraction, near)
    largest = _FIRST * e / s0 / _GROWTH
    while largest < s0 / first:
        largest *= _GROWTH
        ball = jacobian.ball(delta + largest)
        if ball is None:
            break
        Lambda = lipschitz(problem, point, jacobian, contraction, ball)
        L = min(ball.L, (jacobian.L + Lambda * ball.radius) * SLACK)
        found = _radius(step_size, s0, L, Lambda, e, delta)
        if isinstance(found, str):
            reason = reason or found
            continue
        radius, c, slope, s1 = found
        if radius > largest:
            reason = reason or f"the radius {radius:.3g} is beyond the ball of radius {largest:.3g}"
            continue
        rate = rate_after(step_size * slope * s1 / SLACK)
        numbers = {"residual": e, "s0": s0, "L": L, "Lambda": Lambda, "c": c, "slope": slope, "s1": s1}
        if rate < 1:
            return Tail(True, "", radius, rate, numbers | {"omega": contraction.omega})
    return Tail(False, reason or "the contraction may be lost in the ball", shortfall=4 * e * first / s0**2)


def _radius(eta: float, s0: float, L: float, Lambda: float, e: float, delta: float) -> tuple[float, float, float, float] | str:
    """The least radius with c R (s0 - Lambda delta - Lambda R/2) - eta Lambda L e R/2 >= e, and c,
    kappa(R), s(R)."""
    t, small = eta * L * L * SLACK, eta * s0 * s0 * SLACK
    if not t * SLACK < 2 - small:
        return f"the step size times L^2 is {t:.3g}"
    c = (1 - small / 2 if t <= 1 - small / 2 else math.sqrt(t * (2 - t - small))) / SLACK - 1e-10
    lost = eta * Lambda * L * e / 2 * SLACK
    b = (c * (s0 - Lambda * delta * SLACK) - lost) / SLACK  # R (b - c Lambda R/2) >= e
    root = b * b - 2 * c * Lambda * e * SLACK
    if not (c > 0 and b > 0 and root > 0):
        need = b * max(b, 0.0) / (2 * c * Lambda) if c > 0 else 0.0
        return f"|r| = {e:.3g} must be below {need:.3g}"
    radius = 2 * e / (b + math.sqrt(root)) * SLACK**4
    s1 = (s0 - Lambda * (delta + radius) * SLACK) - 1e-12 * s0
    slope = c * s1 - lost - 1e-12 * (c * s0 + lost)
    holds = radius * (b - c * Lambda * radius / 2 * SLACK) / SLACK**2 >= e and eta * L * c * s0 * SLACK <= 1
    if not (slope > 0 and s1 > 0 and holds):
        return f"|r| = {e:.3g} is too large for the radius {radius:.3g}"
    return radius, c, slope, s1


def lipschitz(problem: Problem, point: Point, jacobian: Jacobian, contraction: Contraction, ball: Ball) -> float:
    """Lambda on the ball."""
    k = problem.k
    error = point.slope_error + problem.slopes.most_curvature * float(ball.dv.max())
    tau = contraction.tau_of_slopes(point.V, point.D, error, k * ball.radius, renew=False)
    Xi = (jacobian.Xi + k * norm_up(ball.dz)) * SLACK
    xi = (jacobian.xi + k * ball.dz) * SLACK
    p = float((point.p_norm + ball.dp).max())
    b = k * tau * min(p * Xi, (jacobian.P_op + norm_up(ball.dp)) * float(xi.max()))
    weights = curvature_weights(problem, point, contraction, ball, tau, renew=False)
    return (b + math.hypot(b, tau * Xi) + float((weights * xi).max()) * Xi) * SLACK
