r"""How much one step of descent can spread two iterates: M >= |sum_i r_i Hess f_i| on a ball.

With masks fixed (ReLU) and T_i = (I - D_i R)^-1 D_i, second derivatives in a direction d are

    f_i''[d, d] = 2 (dw + k dA^T p_i)^T T_i dOmega xi_i + 2 dv^T D'_i l dU x_i + sum_u a_iu s''_iu dv_iu^2,

dOmega xi_i = k dA z_i + l D'_i dU x_i, where a_i = w + R^T p_i, and dv_i = (I - R D_i)^-1 dOmega
xi_i; the last sum is only there for smooth activations. Hence M = s/2 + sqrt(s^2/4 + A^2), s = 2 B
+ E, where A bounds the part linear in dw and dv, 2 B the part quadratic in dOmega, and E the last
sum.

For c = U x the xi_i and the p_i are expanded in a few leading left singular vectors v_j of (xi_i)_i
and one, u, of (p_i)_i: xi_i = sum_j v_j(i) b_j + rest. Every T_i is only known by |T_i| <= tau, so

    |sum_i r_i v_j(i) T_i| <= tau |r o v_j|_1,     |sum_i r_i u(i) v_j(i) T_i| <= tau |r o u o v_j|_1,

and Cauchy's inequality does for the rests. Where the T_i themselves are known (`_explicit`), the
sums on the left are made, and the norm of those with all v_j side by side is bounded: signs of r_i
then cancel. The vectors need not be exact: see `_Expansion.factor`.
E = lambda_max(g Gram g), g_i^2 = |r_i| c_i, c_i >= |K_i^T diag(a_i s''_i) K_i|, K_i = (I - R
D_i)^-1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wellposed.prove._contraction import Contraction
from wellposed.prove._explicit import Explicit
from wellposed.prove._jacobian import ParameterBall, PredictionJacobian, top_eigenvalue
from wellposed.prove._point import ComputedPoint
from wellposed.prove._problem import ProvedProblem
from wellposed.prove._resolvent import Around, SampleNorms
from wellposed.prove.error_free import SLACK, UNIT, gamma, norm_up, rows_up

#: Leading singular vectors of (xi_i)_i and of (p_i)_i.
_VECTORS_XI, _VECTORS_P = 3, 1


class _Expansion:
    """F = sum_j v_j b_j^T + F' for a matrix F with n rows, given its Gram matrix G.

    With any v_j, b_j = F^T v_j and F' = (I - sum v_j v_j^T) F, and numbers s_j, s', the vectors
    b_j/s_j and the rows of F'/s', as one matrix, have a norm of at most `factor`: it is 1 for
    singular vectors and values, and proved for those that were computed.

    Attributes:
        vectors: (j, n). sizes: s_1, ..., s_j, s'. factor: See above.
    """

    def __init__(self, G: Tensor, error: float, count: int) -> None:
        n = G.shape[0]
        count = min(count, n - 1)
        values, vectors = torch.linalg.eigh((G + G.T) / 2)
        order = torch.arange(n - 1, n - 2 - count, -1)
        sizes = values[order].clamp(min=max(1e-9 * float(values[-1]), 1e-300)).sqrt()
        self.vectors, self.sizes = vectors[:, order[:count]].T.contiguous(), sizes.tolist()
        rest = torch.eye(n, dtype=G.dtype) - self.vectors.T @ self.vectors
        Y = torch.cat([self.vectors / sizes[:count].unsqueeze(1), rest / sizes[count]])
        size = norm_up(Y) ** 2
        product = Y @ G @ Y.T
        rounding = 16 * gamma(n) * size * norm_up(G)
        self.factor = math.sqrt(max(0.0, top_eigenvalue(product)) + rounding + size * error) * SLACK


def expansion(
    problem: ProvedProblem,
    point: ComputedPoint,
    jacobian: PredictionJacobian,
    contraction: Contraction,
    ball: ParameterBall,
    norms: SampleNorms | None = None,
    explicit: Explicit | None = None,
) -> float:
    """M on the ball, in which slopes do not jump; better if the norms of its samples, or its T_i,
    are known."""
    slopes, k = problem.slopes, problem.k
    c: Tensor | None
    if norms is not None:
        tau, c = norms.tau, norms.c
    else:
        error = point.slope_error + slopes.most_curvature * float(ball.dv.max())
        tau = contraction.tau_of_slopes(point.V, point.D, error, k * ball.radius)
        c = curvature_weights(problem, point, contraction, ball, tau, renew=True) if slopes.smooth else None
    r = norm_up(point.r)
    read = math.hypot(problem.trains_w, k * float(point.p_norm.max()))
    if problem.rectified:
        Z_op = math.sqrt(max(0.0, jacobian.Z_square))
        X_op = math.sqrt(max(0.0, top_eigenvalue(problem.XX)) + problem.XX_error)
        Xi = math.hypot(k * Z_op, problem.ell * X_op) * SLACK
        A = math.hypot(tau * r * Xi * problem.trains_w, r * problem.ell * X_op * problem.trains_v)
        B = k * float(point.p_norm.max()) * tau * r * Xi
    else:
        Xi = jacobian.Xi
        A, B = _linear_and_quadratic(problem, point, jacobian, tau, ball, explicit)
    # r, p and xi at other points of the ball, and their errors; each part is linear in them
    moved_Xi = Xi + k * norm_up(ball.dz)
    moved_read = math.hypot(problem.trains_w, k * float((point.p_norm + ball.dp).max()))
    extra = ball.dr * moved_read * moved_Xi + r * k * float(ball.dp.max()) * moved_Xi + r * read * k * norm_up(ball.dz)
    extra = 2 * tau * extra + 2 * ball.dr * problem.ell * problem.trains_v * norm_up(problem.X)
    half = B if c is None else B + _curved(problem, point, jacobian, ball, c) / 2
    return (half + math.hypot(half, A) + extra) * SLACK


def _linear_and_quadratic(
    problem: ProvedProblem,
    point: ComputedPoint,
    jacobian: PredictionJacobian,
    tau: float,
    ball: ParameterBall,
    explicit: Explicit | None,
) -> tuple[float, float]:
    """A and B of this module at the computed r, p, xi, for c = U x."""
    r = point.r
    xi = _Expansion(jacobian.gram, jacobian.gram_error, _VECTORS_XI)
    p = _Expansion(jacobian.PP, jacobian.PP_error, _VECTORS_P)
    leading = r * xi.vectors * torch.tensor(xi.sizes[:-1], dtype=torch.float64).unsqueeze(1)

    def block(weights: Tensor) -> list[float]:
        """Norms of the sums of weights_ji T_i, of all or one by one."""
        if explicit is None or not len(weights):
            return [tau * float(row.abs().sum()) for row in weights]
        inverse = 1 + ball.R_norm * tau
        return [explicit.norm_of_sums(weights, tau=tau, inverse=inverse, change=problem.k * ball.radius)]

    A = 0.0
    if problem.trains_w:
        A = math.hypot(*block(leading), xi.sizes[-1] * tau * norm_up(r)) * xi.factor
    rows = []
    for u, s in zip(p.vectors, p.sizes, strict=False):
        rows.append([s * part for part in (*block(u * leading), xi.sizes[-1] * tau * norm_up(r * u))])
    rest = [tau * norm_up(row) for row in leading]
    if explicit is not None and rest:
        rest = [math.hypot(*rest)]
    rows.append([p.sizes[-1] * part for part in (*rest, xi.sizes[-1] * tau * float(r.abs().max()))])
    N = problem.k * torch.tensor(rows, dtype=torch.float64)
    # |N| from its Gram matrix, which has at most 2 rows; the trace is exact enough for the rounding of it
    NN = N @ N.T
    B = math.sqrt(top_eigenvalue(NN) + 16 * gamma(4) * float(NN.trace())) * p.factor * xi.factor
    return A * SLACK, B * SLACK


def around(problem: ProvedProblem, point: ComputedPoint, contraction: Contraction, ball: ParameterBall) -> Around:
    """What `Resolvents` needs to know of a ball."""
    slopes = problem.slopes
    moved, da, a, curved = _bent(problem, point, ball)
    b = point.adjoint * slopes.curvature(point.V)
    # a' s''(v') - a s''(v) = (a' - a) s''(v) + a' (s''(v') - s''(v)), and the rounding of b
    db = (da * curved + a * (slopes.most_third * moved + 4 * slopes.slope_error)) * SLACK
    most = a * slopes.most_curvature * SLACK
    low, high = torch.maximum(b - db, -most), torch.minimum(b + db, most)
    dD = slopes.most_curvature * ball.dv * SLACK
    return Around(point.at.R, point.D, b, contraction.R_norm, problem.k * ball.radius, point.slope_error, dD, low, high)


def _bent(problem: ProvedProblem, point: ComputedPoint, ball: ParameterBall) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(n, m) how far V moves on the ball, (n, 1) how far a = w + R^T p does, (n, m) bounds of |a|
    and |s''|."""
    slopes = problem.slopes
    moved = (point.v_error + ball.dv.unsqueeze(1)) * SLACK
    # a moves by dw + dR^T p + R'^T dp; its rounding is a part of that of p
    read = torch.hypot(torch.full_like(point.p_norm, problem.trains_w), problem.k * point.p_norm)
    da = ball.radius * read + ball.R_norm * ball.dp + 2 * point.p_error + 4 * UNIT * rows_up(point.adjoint)
    da = da.unsqueeze(1) * SLACK
    curved = (slopes.curvature(point.V).abs() + slopes.most_third * moved + slopes.slope_error).clamp(max=slopes.most_curvature)
    return moved, da, point.adjoint.abs() + da, curved


def curvature_weights(
    problem: ProvedProblem, point: ComputedPoint, contraction: Contraction, ball: ParameterBall, tau: float, *, renew: bool
) -> Tensor:
    r"""(n,) c_i >= |K^T diag(a s'') K| on the ball, K = (I - R D)^-1 = I + R T, a = w + R^T p.

    The least of three: max|a s''/s'| |D^1/2 K|^2 <= max|a s''/s'| tau^2; max|a s''| (1 + |R|
    tau)^2; and (max t + |diag(t) R| tau)^2 with t^2 = |a s''|, for which t is replaced by its
    maximum over the samples.
    """
    slopes = problem.slopes
    moved, da, a, curved = _bent(problem, point, ball)
    ratio = slopes.curvature_ratio(point.V) + 2 * moved + slopes.slope_error
    by_ratio = (a * ratio).amax(dim=1) * tau**2
    squares = a * curved * SLACK
    largest = squares.amax(dim=1)
    direct = largest * (1 + ball.R_norm * tau) ** 2
    rows = (
        contraction.row_weighted_norm(squares.amax(dim=0), renew=renew)
        + math.sqrt(float(largest.max())) * problem.k * ball.radius
    )
    by_rows = (largest.sqrt() + rows * tau).square()
    return torch.minimum(torch.minimum(by_ratio, direct), by_rows) * SLACK


def _curved(
    problem: ProvedProblem, point: ComputedPoint, jacobian: PredictionJacobian, ball: ParameterBall, c: Tensor
) -> float:
    """E = lambda_max(g Gram g), g_i^2 = |r_i| c_i, on the ball."""
    g = ((point.r.abs() + ball.dr) * c).sqrt()
    G = g.unsqueeze(1) * jacobian.gram * g
    top = max(0.0, top_eigenvalue(G)) + float(g.square().max()) * jacobian.gram_error + 8 * gamma(4) * float(G.diagonal().sum())
    return (math.sqrt(top) + problem.k * norm_up(g * ball.dz)) ** 2 * SLACK
