r"""One-sided bounds in float64 for the check of a proof, proved by Cholesky factorizations.

If the factorization of fl(S) - c I runs to its end in float64, then S is positive definite if only
c >= gamma_{m+2} tr(S) + |fl(S) - S| (Theorem 10.3 of [higham2002]; no more is used than that sums
and products are rounded to the nearest number, in any order).
"""

from __future__ import annotations

import math

import numpy as np

from wellposed.prove.verify_digits import Floats
from wellposed.prove.verify_place import ROOM, norm

UNIT = 2.0**-53
#: Added to every error: above what underflow can take away, and below the last digit of everything else.
_TINY = 1e-100


def is_positive(S: Floats, error: float) -> bool:
    """Whether every symmetric matrix within `error` of S is proved to be positive definite."""
    m = S.shape[0]
    shift = (4 * (m + 4) * UNIT * float(np.abs(np.diagonal(S)).sum()) + error) * ROOM
    try:
        np.linalg.cholesky(S - shift * np.eye(m))
    except np.linalg.LinAlgError:
        return False
    return True


def top_eigenvalue(S: Floats, error: float) -> float:
    """Upper bound of the largest eigenvalue of all symmetric matrices within `error` of S."""
    if S.shape[0] == 0:
        return 0.0
    S = (S + S.T) / 2
    guess, size = float(np.linalg.eigvalsh(S)[-1]), norm(S)
    error = error + 4 * UNIT * size + _TINY
    eye, slack = np.eye(S.shape[0]), 1e-13 * size + 2 * error
    for _ in range(40):
        if is_positive((guess + slack) * eye - S, error):
            return guess + slack
        slack *= 4
    return math.inf


def symmetric_norm(S: Floats, error: float) -> float:
    """Upper bound of the norms of all symmetric matrices within `error` of S."""
    S = (S + S.T) / 2
    values, size = np.linalg.eigvalsh(S), norm(S)
    guess = float(max(values[-1], -values[0])) + 1e-9 * size + 4 * error
    error, eye = error + 4 * UNIT * size + _TINY, np.eye(S.shape[0])
    if is_positive(guess * eye - S, error) and is_positive(guess * eye + S, error):
        return guess
    return size + error


def omega_bounds(R: Floats, lost: float) -> tuple[float, float]:
    """Bounds from below and from above of lambda_max((R' + R'^T)/2) for |R' - R| <= lost."""
    S = (R + R.T) / 2
    v = np.linalg.eigh(S)[1][:, -1]
    rayleigh = float(v @ S @ v) / float(v @ v)
    below = rayleigh - (8 * (R.shape[0] + 4) * UNIT * norm(R) + lost) * ROOM
    return below, top_eigenvalue(S, lost)


def active_omega(R: Floats, lost: float, slopes: Floats) -> float:
    """max(0, lambda_max(sym E^1/2 R E^1/2)) over the rows E of slopes, from above."""
    largest, guess = 0.0, 0.0
    for E in slopes:
        index = np.flatnonzero(E)
        root = np.sqrt(E[index])
        A = R[np.ix_(index, index)] * (root[:, None] * root)
        S, error = (A + A.T) / 2, 8 * UNIT * norm(A) + lost
        if guess and is_positive(guess * np.eye(len(index)) - S, error):
            continue
        guess = max(0.0, top_eigenvalue(S, error)) * (1 + 1e-3) + 1e-12
        largest = max(largest, guess)
    return largest


def spectral_norm(A: Floats) -> float:
    """|A| from above."""
    if A.shape[0] > A.shape[1]:
        A = A.T
    error = 8 * (A.shape[1] + 4) * UNIT * norm(A) ** 2
    return math.sqrt(max(0.0, top_eigenvalue(A @ A.T, error))) * ROOM
