r"""Norms of single samples for smooth activations: |K_i|, |D_i K_i| and |K_i^T diag(b_i) K_i|.

K_i = (I - R D_i)^-1 and b_i = a_i s''_i. With B_i = (I - R D_i)^T (I - R D_i), for all t > 0,

    K_i^T diag(x) K_i <= t I     if and only if     B_i - diag(x)/t >= 0,                        (1)

which is one Cholesky factorization that is checked. B_i needs one product R^T R for all samples: it
is I - R D_i - D_i R^T + D_i (R^T R) D_i. x = 1, D_i^2, b_i and -b_i give the norms at a
*reference*, any numbers R, D_i and bounds b_i^- <= b_i^+ of the b_i. They are carried to R', D_i',
b_i' nearby: with E = R' D_i' - R D_i, q = |E||K_i| < 1 and K_i' = K_i (I - E K_i)^-1,

    |D_i' K_i'| <= (|D_i K_i| + |D_i' - D_i||K_i|)/(1 - q),
    |K_i'^T diag(b_i') K_i'| <= (c_i + |K_i|^2 max (b_i' - b_i^+, b_i^- - b_i', 0))/(1 - q)^2.

|R (D_i' - D_i)| is at most |R| times the largest change, and at most the longest column of R times
the norm of all changes: the first for the change of the centre, which is seen, the second for that
in a ball, of which only the norm is known.

A reference is taken ahead of the present point: half the way from where the last one was taken, and
the b_i^-, b_i^+ contain the whole of that way. Points that follow are nearer to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.linalg.verified_cholesky import shifted_factor, unexplained
from wellposed.prove._problem import Exact
from wellposed.prove.error_free import SLACK, UNIT, gamma, norm_up

#: Steps of the Lanczos process that guesses norms, and of the series for each of its products.
_STEPS, _TERMS = 24, 30
#: What a guess is raised by before its test, and after a test that fails.
_FIRST, _RAISED, _TESTS = 1.02, 1.04, 24
#: How far a reference reaches ahead, in units of the way from where the last one was taken.
_AHEAD = 1.0
#: Samples from which norms that are common to all are guessed.
_SAMPLES = 8


@dataclass(frozen=True)
class SampleNorms:
    """Bounds on a ball.

    Attributes:
        K: >= |K_i| for all samples. tau: >= |D_i K_i|. c: (n,) >= |K_i^T diag(b_i) K_i|.
    """

    K: float
    tau: float
    c: Tensor


@dataclass(frozen=True)
class Around:
    """R, slopes and curvatures at all points of a ball.

    Attributes:
        R: At the centre. D, b: (n, m) at the centre. R_norm: >= |R|.
        dR: How far R moves, in norm. D_error: How far off the entries of D are.
        dD: (n,) how far the slopes move, in the Euclidean norm. low, high: (n, m) bounds of b.
    """

    R: Exact
    D: Tensor
    b: Tensor
    R_norm: float
    dR: float
    D_error: float
    dD: Tensor
    low: Tensor
    high: Tensor


class Resolvents:
    """The norms along a descent, from a reference that `renew` proves.

    Attributes:
        fresh: Those of the reference itself; None before the first.
        lost: A count of the caller's, of what the age of the reference has cost.
    """

    def __init__(self) -> None:
        self.fresh: SampleNorms | None = None
        self.lost = 0.0
        self._last: tuple[Tensor, Tensor, Tensor] | None = None

    def see(self, at: Around) -> None:
        """Keeps a point as the one from which the next reference is extrapolated."""
        self._last = at.R.high, at.D, at.b

    def renew(self, at: Around, *, ball: bool = False) -> None:
        """Takes a reference ahead of these values, or one for this `ball`, and proves its norms."""
        R, D, low, high = at.R.high, at.D, at.low, at.high
        if self._last is not None and not ball:
            R, D, b = (now + _AHEAD * (now - old) for now, old in zip((R, D, at.b), self._last, strict=True))
            R, D = (R + at.R.high) / 2, ((D + at.D) / 2).clamp(0.0, 1.0)
            low, high = torch.minimum(low, b), torch.maximum(high, b)
        self.see(at)
        self.lost = 0.0
        self._R, self._D, self._low, self._high = R, D, low, high
        self._R_norm = (at.R_norm + norm_up(at.R.low) + norm_up(R - at.R.high)) * SLACK
        self._column = float(torch.linalg.vector_norm(R, dim=0).max()) * SLACK * (1 + gamma(R.shape[0]))
        K, tau, c = proved_norms(R, D, low, high)
        self.fresh = SampleNorms(K, tau, c) if math.isfinite(K + tau + float(c.max())) else None

    def carried(self, at: Around) -> SampleNorms | None:
        """The norms on a ball; None if there is no reference near enough."""
        if self.fresh is None:
            return None
        dR = norm_up(at.R.high - self._R) + norm_up(at.R.low) + at.dR
        seen = (at.D - self._D).abs().amax(dim=1) * SLACK + at.D_error
        E = dR + self._R_norm * seen + self._column * at.dD
        K = self.fresh.K
        left = 1 - E * K * SLACK
        if not bool((left > 0).all()):
            return None
        tau = float(((self.fresh.tau + (seen + at.dD) * K) / left).max())
        beyond = torch.maximum(at.high - self._high, self._low - at.low).amax(dim=1).clamp(min=0.0)
        c = (self.fresh.c + K**2 * beyond) / left.square()
        return SampleNorms(K / float(left.min()) * SLACK, tau * SLACK, c * SLACK)


def proved_norms(R: Tensor, D: Tensor, low: Tensor, high: Tensor) -> tuple[float, float, Tensor]:
    """Upper bounds of all |K_i|, of all |D_i K_i|, and of each |K_i^T diag(b) K_i| for low <= b <=
    high; infinite where nothing could be proved.

    Args:
        R: (m, m). D, low, high: (n, m); D in [0, 1].
    """
    G = R.T @ R
    G = (G + G.T) / 2
    few = slice(None, None, -(-len(D) // _SAMPLES))
    ones = torch.ones_like(D)
    square, square_D = (_FIRST * float(ritz_values(R, D[few], x[few])[1].max()) for x in (ones, D.square()))
    below, above = _FIRST * ritz_values(R, D, low)[0], _FIRST * ritz_values(R, D, high)[1]
    c = torch.zeros(len(D), dtype=torch.float64)
    for i, d in enumerate(D):
        B, error = _gram(R, G, d)
        square = _proved(B, error, ones[i], square)
        square_D = _proved(B, error, d.square(), square_D)
        c[i] = max(_proved(B, error, high[i], float(above[i])), _proved(B, error, -low[i], -float(below[i])))
    return math.sqrt(square) * SLACK, math.sqrt(square_D) * SLACK, c


def _gram(R: Tensor, G: Tensor, d: Tensor) -> tuple[Tensor, float]:
    """B of this module, exactly symmetric, and a bound of its rounding in the Frobenius norm.

    Entries of G have errors of at most gamma |R_u| |R_v|, columns of R; every term is rounded a few
    times.
    """
    A = R * d
    B = torch.outer(d, d).mul_(G).sub_(A + A.T)
    B.diagonal().add_(1.0)
    return B, (gamma(len(d)) + 16 * UNIT) * (math.sqrt(len(d)) + norm_up(A)) ** 2 * SLACK


def _proved(B: Tensor, error: float, x: Tensor, guess: float) -> float:
    """The guess if B - diag(x)/guess >= 0 can be proved, or a larger number; infinite if none was
    found."""
    largest, factor = float(x.max()), _RAISED
    t = max(guess, 1e-3 * largest, 1e-200)
    for _ in range(_TESTS):
        if largest <= 0 or _is_at_least(B, x / t, error):
            return t
        t, factor = t * factor, min(2.0, factor**2)
    return math.inf


def _is_at_least(B: Tensor, x: Tensor, error: float) -> bool:
    """Whether B' - diag(x) >= 0 is proved for every symmetric B' within `error` of B."""
    S = B.clone()
    S.diagonal().sub_(x)
    error = error + 8 * UNIT * (norm_up(x) + norm_up(B.diagonal()))
    shift = 4 * (error + 200 * UNIT * float(S.diagonal().abs().sum()))
    L = shifted_factor(S, -shift)
    return L is not None and shift - unexplained(S, L, shift) >= error


def ritz_values(R: Tensor, D: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """(n,) guesses of the least and the largest eigenvalue of K_i^T diag(b_i) K_i, in single
    precision."""
    n, m = D.shape
    R, D, b = R.float(), D.float(), b.float()

    def product(v: Tensor) -> Tensor:
        u = v
        for _ in range(_TERMS):  # u = v + R D u
            u, before = v + (u * D) @ R.T, u
            if not float((u - before).norm()) > 1e-4 * float(u.norm()):
                break
        u = b * u
        x = u
        for _ in range(_TERMS):  # x = u + D R^T x
            x, before = u + D * (x @ R), x
            if not float((x - before).norm()) > 1e-4 * float(x.norm()):
                break
        return x

    steps = min(_STEPS, m)
    v = torch.randn(n, m, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    v = v / v.norm(dim=1, keepdim=True)
    old, beta = torch.zeros_like(v), torch.zeros(n, 1, dtype=torch.float32)
    T = torch.zeros(n, steps, steps, dtype=torch.float64)
    for j in range(steps):
        u = product(v) - beta * old
        alpha = (u * v).sum(dim=1, keepdim=True)
        T[:, j, j] = alpha.squeeze(1)
        u = u - alpha * v
        beta = u.norm(dim=1, keepdim=True)
        if j + 1 < steps:
            T[:, j, j + 1] = T[:, j + 1, j] = beta.squeeze(1)
            old, v = v, u / beta.clamp(min=1e-30)
    values = torch.linalg.eigvalsh(T.nan_to_num(0.0, 0.0, 0.0))
    return values[:, 0], values[:, -1]
