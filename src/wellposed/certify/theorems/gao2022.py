"""Theorems 3.1 and 3.2 of [gao2022] on `SkipDEQ`: reported, never certified, because their
constants are not stated."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from wellposed.certify.certificate import Certificate, Hypothesis, in_range
from wellposed.certify.measurement import Measurement
from wellposed.certify.theorems._conditions import errors_of, gram_bounds, has_signs, measured_for, parallel, report, unit_norm
from wellposed.kernel import relu_gram, tangent_kernel
from wellposed.linalg import spectral_norm_upper
from wellposed.linalg.directed import down, up, vector_norm_upper


def gao2022(model: Any, X: Tensor, y: Tensor, *, dynamics: str = "flow") -> Certificate:
    r"""[gao2022, Theorem 3.1] (flow) or [gao2022, Theorem 3.2] (descent) for a `SkipDEQ`, as a
    report.

    With lambda_0 = lambda_min(G_inf), G_inf = E[relu(X w) relu(X w)^T], the theorems promise
    |r(t)|^2 <= exp(-lambda_0 t) |r_0|^2 and |r_k|^2 <= (1 - step lambda_0/2)^k |r_0|^2 with high
    probability for m = Omega(n^2/lambda_0^2 log(n/delta)), 0 < gamma < min(1/2, 1/(4 c)), where
    |A|, |W| <= c sqrt(m), and steps O(lambda_0/n^2). No constant is stated, so nothing can be
    CERTIFIED. What can be measured is.

    What stands in the way of more:

    - Lemma 3.5 keeps |u(t)| <= 16 c sqrt(n) |r_0|/lambda_0, but |u(0)| = sqrt(m), and the width
      that its own proof needs is 8 |X|^2/lambda_0 >= 16 times the largest for which that is true at
      t = 0. Repaired with |u|, |v| <= 2 sqrt(m) it asks for m >= 192^2 c^2 n |X|_F^4
      |r_0|^2/lambda_0^4, so n^4/lambda_0^4 as in [gao2023].
    - Lemma 3.4 takes relu to be 1-Lipschitz in the operator norm, which is false; |X|_F replaces
      |X|.
    - For descent, the cross term (43) is of order c^2 n at every width, against lambda_0/2: the
      printed proof does not close.

    Args:
        model: A `SkipDEQ`.
        X: (n, d). y: (n,).
        dynamics: "flow" or "descent".

    Examples:
        >>> import torch, wellposed as wp
        >>> X, y = wp.data.load("sphere", n=3, features=20, dtype=torch.float64)
        >>> model = wp.SkipDEQ(20, 60, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        >>> certificate = wp.certify.gao2022(model, X, y)
        >>> certificate.verdict is wp.Verdict.CERTIFIED, certificate.measured["lambda_min(G_inf)"] > 0
        (False, True)
    """
    point = measured_for("gao2022", "SkipDEQ", model, X, y, dynamics=dynamics)
    if isinstance(point, Certificate):
        return point
    return in_range("gao2022", dynamics, lambda: _reported(point, X.detach().double().cpu(), dynamics))


def _reported(point: Measurement, X: Tensor, dynamics: str) -> Certificate:
    """The report; X as it was given."""
    twin: Any = point.model
    n, m = X.shape[0], twin.width
    lower, upper = point.unit.around(gram_bounds(relu_gram(point.X)), 2)
    G_lower, G_upper = point.unit.around(gram_bounds(point.C @ point.C.t()), 2)
    residual, X_norm, X_norm_F = (point.unit.upper(size) for size in (point.residual, point.X_norm, point.X_norm_F))
    A, W = spectral_norm_upper(twin.A.detach()) / math.sqrt(m), spectral_norm_upper(twin.W.detach()) / math.sqrt(m)
    c = max(A, W)
    inverse = 1 / lower if lower > 0 else math.inf
    # each of them infinite where it overflows
    order = up(n**2 * inverse * inverse)
    root = 16 * c * math.sqrt(n) * residual * inverse
    allowed = up(root * root)
    needed = up(allowed * 8 * X_norm * inverse * X_norm)
    repaired = up(144.0 * root * root * X_norm_F * inverse * X_norm_F * X_norm_F * inverse * X_norm_F)
    hypotheses = (
        unit_norm(X, "[gao2022, Assumption 2]"),
        parallel(X, "[gao2022, Assumption 2]"),
        has_signs(twin.u, "u", "[gao2022, Assumption 1]", trained=True),
        has_signs(twin.v, "v", "[gao2022, Assumption 1]", trained=True),
        Hypothesis(
            "G_inf is positive definite",
            "[gao2022, Lemma 3.2]",
            lower,
            0.0,
            ">",
            True if lower > 0 else (False if upper <= 0 else None),
        ),
        Hypothesis(
            "the features inherit it",
            "[gao2022, Lemma 3.3]",
            G_lower,
            up(0.75 * upper),
            ">=",
            True if G_lower >= up(0.75 * upper) else (False if G_upper < down(0.75 * lower) else None),
            "lambda_min(G(0)) against 3/4 lambda_0",
        ),
        Hypothesis.compare(
            "gamma leaves room for |A| to double",
            "[gao2022, Lemma 3.5]",
            abs(float(twin.gamma)),
            "<",
            down(min(0.5, 1 / (4 * c)) if c > 0 else 0.5),
            refutes=False,
            note=f"c = max(|A|, |W|)/sqrt(m) = {c:.3g}",
        ),
        Hypothesis(
            "the network is wide", "[gao2022, Theorem 3.1]", float(m), order, ">=", None, "an order: its constant is not stated"
        ),
    )
    measured = {
        "lambda_min(G_inf)": lower,
        "lambda_min(G(0))": G_lower,
        "|A|/sqrt(m)": A,
        "|W|/sqrt(m)": W,
        "|u|/sqrt(m)": vector_norm_upper(twin.u) / math.sqrt(m),
        "|v|/sqrt(m)": vector_norm_upper(twin.v) / math.sqrt(m),
        "|r|": residual,
        "width, order printed n^2/lambda_0^2": order,
        "width at most, for Lemma 3.5 (ii) at t = 0": allowed,
        "width at least, for the proof of Lemma 3.5": needed,
        "width, repaired proof": repaired,
    }
    note = (
        "The constants of the theorem are not stated, so it certifies nothing. Lemma 3.5 can never hold with its own "
        f"width: (ii) at t = 0 needs m <= {allowed:.3g}, its proof m >= {needed:.3g}."
    )
    if dynamics == "descent":
        note += (
            " The cross term (43) of the descent is of order c^2 n at every width, so the printed proof needs lambda_0 of that "
            "order; it comes from a positive semidefinite part of the kernel, which in truth helps."
        )
        parts = tangent_kernel(twin, point.X, by_parameter=True)
        rest = sum(parts[name] for name in ("A", "W") if name in parts)
        largest = float(torch.linalg.eigvalsh(rest)[-1]) if isinstance(rest, Tensor) else 0.0
        measured["lambda_max of that part"] = point.unit.exact(largest, 2)
    return report("gao2022", dynamics, hypotheses, measured, errors_of(point), note)
