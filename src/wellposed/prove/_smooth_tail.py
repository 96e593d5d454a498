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

Lambda: as in `_expansion` with a unit vector u in place of r, Lambda <= h + sqrt(h^2 + tau^2
|Xi|^2), h = b + E/2, b = k tau min(max |p_i| |Xi|, |P| max |xi_i|). E bounds the sum of |u_i| c_i
(xi_i . x)^2 over unit vectors u, x: at most the norm of the numbers c_i <xi_i xi_i^T, x x^T>, hence
E^2 = lambda_max(c_i c_j (xi_i . xi_j)^2), a Hadamard product.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from wellposed.linalg.directed import rate_after
from wellposed.prove._contraction import Contraction
from wellposed.prove._expansion import around, curvature_weights
from wellposed.prove._jacobian import ParameterBall, PredictionJacobian, top_eigenvalue
from wellposed.prove._point import ComputedPoint
from wellposed.prove._problem import ProvedProblem
from wellposed.prove._resolvent import Resolvents
from wellposed.prove._short import short_down, short_up
from wellposed.prove._tail import Tail
from wellposed.prove.error_free import SLACK, UNIT, norm_up

#: Radii are tried from a little above e/s0, the least possible, upwards by this factor: the constants of a small ball are
#: better.
_FIRST, _GROWTH = 1.1, 1.35
#: How many times Lambda of a ball is hoped to be that of its centre, with norms that are proved for the ball.
_HOPED = 1.6
#: How often bounds of a ball and norms on it improve each other.
_ROUNDS = 3


def smooth_tail(
    problem: ProvedProblem,
    point: ComputedPoint,
    jacobian: PredictionJacobian,
    contraction: Contraction,
    step_size: float,
    delta: float,
) -> Tail:
    """Theorem C at this point, whose distance to the exact iterate is at most delta."""
    least = jacobian.least_eigenvalue()
    near = jacobian.ball(delta)
    s0 = short_down(math.sqrt(max(0.0, least)) / SLACK - jacobian.error * SLACK)
    if near is None or not s0 > 0:
        return Tail(False, f"the least eigenvalue of the tangent kernel is only known to be at least {least:.3g}")
    e = short_up((norm_up(point.r) + near.dr) * SLACK)
    reason = ""
    first = lipschitz(problem, point, jacobian, contraction, near)
    for largest, known in _tried(step_size, s0, jacobian.L, first, e, delta):
        ball = _ball(problem, point, jacobian, contraction, delta + largest)
        if ball is None:
            break
        if known is not None:
            known.renew(around(problem, point, contraction, ball), ball=True)
        Lambda = lipschitz(problem, point, jacobian, contraction, ball, known)
        if not math.isfinite(Lambda):
            continue
        Lambda = short_up(Lambda)
        L = short_up(min(ball.L, (jacobian.L + Lambda * ball.radius) * SLACK))
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
            return Tail(True, "", radius, rate, numbers | {"omega": short_up(contraction.omega)})
    return Tail(False, reason or "the contraction may be lost in the ball", shortfall=4 * e * first / s0**2)


def _tried(eta: float, s0: float, L: float, first: float, e: float, delta: float) -> Iterator[tuple[float, Resolvents | None]]:
    """Radii to try, the last with norms of samples that are proved for its ball alone, if Lambda =
    `first` were enough by far."""
    largest = _FIRST * e / s0 / _GROWTH
    while largest < s0 / first:
        largest *= _GROWTH
        yield largest, None
    hoped = _radius(eta, s0, L, _HOPED * first, e, delta)
    if not isinstance(hoped, str):
        yield hoped[0], Resolvents()


def _ball(
    problem: ProvedProblem, point: ComputedPoint, jacobian: PredictionJacobian, contraction: Contraction, radius: float
) -> ParameterBall | None:
    """The ball of this radius: what is known of it gives better norms, and these give more."""
    ball = jacobian.ball(radius)
    for _ in range(_ROUNDS):
        norms = None if ball is None else contraction.resolvents.carried(around(problem, point, contraction, ball))
        if norms is None:
            break
        ball = jacobian.ball(radius, norms)
    return ball


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


def lipschitz(
    problem: ProvedProblem,
    point: ComputedPoint,
    jacobian: PredictionJacobian,
    contraction: Contraction,
    ball: ParameterBall,
    resolvents: Resolvents | None = None,
) -> float:
    """Lambda on the ball, by the norms of samples of the descent, or by these."""
    k = problem.k
    error = point.slope_error + problem.slopes.most_curvature * float(ball.dv.max())
    tau = contraction.tau_of_slopes(point.V, point.D, error, k * ball.radius, renew=False)
    weights = curvature_weights(problem, point, contraction, ball, tau, renew=False)
    known = (resolvents or contraction.resolvents).carried(around(problem, point, contraction, ball))
    if known is not None:
        tau, weights = min(tau, known.tau), torch.minimum(weights, known.c)
    Xi = (jacobian.Xi + k * norm_up(ball.dz)) * SLACK
    xi = float((jacobian.xi + k * ball.dz).max()) * SLACK
    p = float((point.p_norm + ball.dp).max())
    b = k * tau * min(p * Xi, (jacobian.P_op + norm_up(ball.dp)) * xi)
    half = b + _bend(problem, jacobian, ball, weights) / 2
    return (half + math.hypot(half, tau * Xi)) * SLACK


def _bend(problem: ProvedProblem, jacobian: PredictionJacobian, ball: ParameterBall, c: Tensor) -> float:
    """E of this module on the ball.

    There xi_i . x moves by d_i, |d| <= k |dz|, so the numbers move by c_i d_i (2 xi_i . x + d_i).
    """
    k, error = problem.k, jacobian.gram_error
    N = c.unsqueeze(1) * jacobian.gram.square() * c
    # |G o G - G' o G'| <= |G - G'|_F times the largest |g_ij + g'_ij|, and five roundings of each entry
    error = float(c.max()) ** 2 * error * (2 * float(jacobian.xi.max()) ** 2 + error) + 16 * UNIT * norm_up(N)
    moved = float((c * (2 * jacobian.xi + k * ball.dz)).max()) * k * norm_up(ball.dz)
    return (math.sqrt(max(0.0, top_eigenvalue(N)) + error) + moved) * SLACK
