"""Hypotheses about data and initialization, and certificates that only report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from wellposed.certify._certificate import Certificate, Hypothesis, Verdict
from wellposed.certify._directed import down, up, vector_norm_upper
from wellposed.certify._units import UNDERFLOW
from wellposed.linalg import least_eigenvalue_lower
from wellposed.linalg.scaling import ldexp, scaled

__all__ = ["gram_bounds", "has_signs", "parallel", "report", "unit_norm"]

_UNIT = 2.0**-53
#: Data normalised in float32 pass for unit vectors.
_NORMALISED = 1e-6


def report(
    theorem: str,
    dynamics: str,
    hypotheses: Sequence[Hypothesis],
    measured: Mapping[str, float],
    errors: Mapping[str, float],
    note: str,
) -> Certificate:
    """UNDECIDED, or VIOLATED if a hypothesis is false: these theorems state orders, not numbers, and license nothing."""
    false = any(h.holds is False for h in hypotheses)
    verdict = Verdict.VIOLATED if false else Verdict.UNDECIDED
    return Certificate(theorem, verdict, tuple(hypotheses), dynamics, measured=measured, errors=errors, note=note)


def gram_bounds(G: Tensor) -> tuple[float, float]:
    """Lower and upper bounds of the least eigenvalue of a Gram matrix computed entry by entry to about 64 roundings.

    Args:
        G: (n, n) symmetric up to rounding.
    """
    G = (G.detach() + G.detach().t()) / 2
    error = (64 + 2 * len(G)) * _UNIT * vector_norm_upper(G) + UNDERFLOW**2
    x = torch.linalg.eigh(G).eigenvectors[:, 0]
    upper = float(x @ (G @ x)) / float(x @ x)
    return down(least_eigenvalue_lower(G) - error), up(upper + 2 * error)


def unit_norm(X: Tensor, equation: str) -> Hypothesis:
    """|x_i| = 1 for all samples."""
    rows, exponent = scaled(X)
    off = float((ldexp(torch.linalg.vector_norm(rows, dim=1), exponent) - 1).abs().max())
    return Hypothesis.compare(
        "inputs have norm 1", equation, off, "<=", _NORMALISED, note="the largest | |x_i| - 1 |; divide each sample by its norm"
    )


def parallel(X: Tensor, equation: str) -> Hypothesis:
    """No two samples are parallel."""
    rows = torch.stack([scaled(row)[0] for row in X])
    rows = rows / torch.linalg.vector_norm(rows, dim=1, keepdim=True).clamp(min=0.5)  # a row of zeros stays
    cosine = (rows @ rows.t()).abs()
    cosine.fill_diagonal_(0.0)
    largest = float(cosine.max())
    same = any(bool(torch.equal(X[i], X[j])) for i, j in (cosine > 1 - 1e-9).nonzero().tolist())
    holds = True if largest < 1 - 1e-9 else (False if same else None)
    return Hypothesis("no two inputs are parallel", equation, largest, 1.0, "<", holds, "the largest |cosine|")


def has_signs(v: Tensor, name: str, equation: str, *, trained: bool) -> Hypothesis:
    """All entries are +1 or -1; a vector that is trained has them at the start only."""
    off = float((v.detach().abs() - 1).abs().max())
    note = "as at the start; training moves it" if trained else "as drawn; it is not trained"
    return Hypothesis.compare(f"{name} has entries +1 and -1", equation, off, "<=", 0.0, note=note)
