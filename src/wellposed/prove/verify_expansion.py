r"""The largest |sum_i r_i Hess f_i| on a ball, bounded anew for c = U x.

With T_i = (I - D_i R)^-1 D_i, K_i = (I - R D_i)^-1, xi_i = (k z_i, l x_i), G their Gram matrix, the
second derivatives in a direction d = (dw, dR, dU) are

    f_i''[d, d] = 2 (dw + dR^T p_i)^T T_i dOmega xi_i + sum_u a_iu s''_iu (K_i dOmega xi_i)_u^2.

Let A(b) be the norm of dOmega -> sum_i b_i T_i dOmega xi_i. Its square is the norm of sum_ij b_i
b_j G_ij T_i T_j^T, and with b b^T o G <= sum_k nu_k e_k e_k^T + nu I, for any few vectors e_k,

    A(b)^2 <= |sum_k nu_k S_k S_k^T| + nu n tau^2,     S_k = sum_i e_k(i) T_i.                    (1)

For the part quadratic in dOmega let w be the first left singular vector of (p_i)_i, mu and mu' the
squares of its first two singular values. The sum over u is at most E. Together

    s/2 + sqrt(A(r)^2 + s^2/4),     s = 2 B + E,     B^2 = mu A(r o w)^2 + mu' tau^2 lambda_max(r G r),
    E = lambda_max(g G g),          g_i^2 = |r_i| c_i,   c_i >= |K_i^T diag(a_i s''_i) K_i|.

The T_i are explicit here, and in (1) not one by one, so this is sharper than what a prover needs.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from wellposed.prove.verify_activation import CURVATURE, THIRD, curvature, curvature_ratio
from wellposed.prove.verify_bounds import UNIT, spectral_norm, top_eigenvalue
from wellposed.prove.verify_digits import Floats
from wellposed.prove.verify_place import ROOM, norm
from wellposed.prove.verify_resolvent import Bend

Indices = NDArray[np.int64]
#: Vectors e_k in (1).
_VECTORS = 8


class _Weights:
    """b b^T o G <= sum_k values_k e_k e_k^T + rest I, and the sums S_k."""

    def __init__(self, b: Floats, G: Floats, G_error: float, m: int) -> None:
        C = b[:, None] * G * b
        values, vectors = np.linalg.eigh((C + C.T) / 2)
        count = min(_VECTORS, len(b))
        self.values, self.vectors = np.maximum(values[::-1][:count], 0.0), vectors[:, ::-1][:, :count].T
        below = sum(v * np.outer(e, e) for v, e in zip(self.values, self.vectors, strict=True))
        error = float(np.square(b).max()) * G_error + 16 * (count + 4) * UNIT * norm(C)
        self.rest = max(0.0, top_eigenvalue(C - below, error))
        self.sums = np.zeros((count, m, m))

    def add(self, i: int, index: Indices, T: Floats) -> None:
        for e, S in zip(self.vectors, self.sums, strict=True):
            S[np.ix_(index, index)] += e[i] * T

    def square(self, tau: float, T_error: float) -> float:
        """A(b)^2 from above; T_error bounds the errors of all T_i together."""
        m, n = self.sums.shape[1], self.vectors.shape[1]
        total = sum(v * S @ S.T for v, S in zip(self.values, self.sums, strict=True))
        sizes = [norm(S) for S in self.sums]
        rounding = sum(v * (8 * (m + n + 8) * UNIT * s * s + 2 * s * T_error) for v, s in zip(self.values, sizes, strict=True))
        return (max(0.0, top_eigenvalue(np.asarray(total), float(rounding))) + self.rest * n * tau**2) * ROOM


def _resolvent(R: Floats, D: Floats) -> tuple[Indices, Floats, float]:
    """(indices, T restricted to them, |error|) for T = (I - D R)^-1 D, with slopes D."""
    index = np.flatnonzero(D)
    R, d = R[np.ix_(index, index)], D[index]
    A = np.eye(len(index)) - d[:, None] * R
    inverse = np.asarray(np.linalg.inv(A), dtype=np.float64)
    residual = norm(np.eye(len(index)) - A @ inverse) + 8 * (len(index) + 4) * UNIT * norm(A) * norm(inverse)
    if not residual < 0.5:
        return index, inverse * d, math.inf
    return index, inverse * d, 2 * residual * norm(inverse) * ROOM


def expansion_upper(R: Floats, Z: Floats, X: Floats, P: Floats, D: Floats, r: Floats, tau: float, bend: Bend | None) -> float:
    """The sum of roots above, for k = l = 1; tau bounds all |T_i|, and E is that of the bend."""
    n, m = Z.shape
    G, PP = Z @ Z.T + X @ X.T, P @ P.T
    G_error = 8 * (m + X.shape[1]) * UNIT * float(np.trace(G))
    values, vectors = np.linalg.eigh(PP)
    mu, w = max(0.0, float(values[-1])), vectors[:, -1]
    # P P^T <= mu w w^T + mu' I
    second = max(0.0, top_eigenvalue(PP - mu * np.outer(w, w), 32 * (m + 8) * UNIT * float(np.trace(PP))))
    linear, quadratic = _Weights(r, G, G_error, m), _Weights(r * w, G, G_error, m)
    error = 0.0
    for i in range(n):
        index, T, wrong = _resolvent(R, D[i])
        error += wrong
        linear.add(i, index, T)
        quadratic.add(i, index, T)
        if bend is not None:
            whole = np.zeros((m, m))  # slopes below the last digit are 0
            whole[np.ix_(index, index)] = T
            bend.add(i, whole, wrong)
    if bend is not None:
        tau = min(tau, bend.tau)
    A2 = linear.square(tau, error)
    rGr = max(0.0, top_eigenvalue(r[:, None] * G * r, float(np.square(r).max()) * G_error))
    B = math.sqrt(mu * quadratic.square(tau, error) + second * tau**2 * rGr)
    half = B if bend is None else B + bend.upper(G) / 2
    return (half + math.sqrt(A2 + half * half)) * ROOM


def curvature_weights(
    activation: str, V: Floats, adjoint: Floats, moved: Floats, *, tau: float, R_norm: float, R: Floats, change: float
) -> Floats:
    """(n,) c_i >= |K_i^T diag(a_i s''_i) K_i| on a ball, for a smooth activation.

    K_i = I + R T_i, so it is the square of |diag(t_i) + diag(t_i) R T_i|, t_i^2 = |a_i s''_i|: at
    most (max t_i + |diag(t) R| tau)^2 for every t >= t_i.

    Args:
        activation: Its name.
        V: (n, m) pre-activations at the centre. moved: (n,) how far they move.
        adjoint: (n, m) >= |w + R^T p| on the ball.
        tau: >= |D_i^1/2 K_i|, |T_i| on the ball. R_norm: >= |R| on the ball.
        R: At the centre. change: >= |R - R'| on the ball.
    """
    bent = curvature(activation, V) + THIRD[activation] * moved[:, None] + 1e-15
    bent = np.minimum(bent, CURVATURE[activation])
    largest = (adjoint * bent).max(axis=1)
    direct = largest * (1 + R_norm * tau) ** 2
    t = np.sqrt((adjoint * bent).max(axis=0)) * ROOM
    by_rows = (np.sqrt(largest) + (spectral_norm(t[:, None] * R) + float(t.max()) * change) * tau) ** 2 * ROOM
    ratio = curvature_ratio(activation, V) + 2 * moved[:, None] + 1e-15
    by_ratio = (adjoint * ratio).max(axis=1) * tau**2
    return np.asarray(np.minimum(np.minimum(by_ratio, direct), by_rows) * ROOM)
