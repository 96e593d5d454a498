"""Theorem 3.1 of [gao2023] on `ImplicitOnlyDEQ`: reported, never certified, because its constants
are not stated."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from wellposed.certify.certificate import Certificate, Hypothesis, in_range
from wellposed.certify.measurement import Measurement
from wellposed.certify.theorems._conditions import errors_of, gram_bounds, has_signs, measured_for, report, unit_norm
from wellposed.linalg import spectral_norm_upper
from wellposed.linalg.directed import down, up, vector_norm_upper

_ROUNDS = 1000


def gao2023(model: Any, X: Tensor, y: Tensor) -> Certificate:
    r"""[gao2023, Theorem 3.1] for an `ImplicitOnlyDEQ`, as a report.

    With lambda_0 = lambda_min(H(0)), H = (gamma^2/m)(P P^T) o (Z Z^T), it promises |r(t)|^2 <=
    exp(-lambda_0 t)|r_0|^2 for the flow with probability 1 - delta, for m = Omega(n^4/(lambda_0^4
    delta)). No constant is stated, so nothing can be CERTIFIED.

    If lambda_min(H(t)) >= lambda_0/2 for all t, then A moves by at most the least R with

        R >= 2 gamma |Phi|_F |r_0|/(lambda_0 (1 - q)^2),     q = gamma (|A| + R) < 1

    which is reported with whether it leaves a contraction. That premise is the gap: (13)-(15) bound
    the change of H with sigma'' = 0, so they ignore changes of the masks, and for ReLU no rigorous
    constant comes out.

    The paper takes |A(0)| <= sqrt(m) "without loss of generality"; Gaussian matrices have 2
    sqrt(m). Its half-normal example has |A(0)| = m sqrt(2/pi) and then no equilibrium;
    `ImplicitOnlyDEQ(init="half_normal")` divides the entries by sqrt(m).

    Args:
        model: An `ImplicitOnlyDEQ`.
        X: (n, d). y: (n,).

    Examples:
        >>> import torch, wellposed as wp
        >>> X, y = wp.data.load("sphere", n=3, features=20, dtype=torch.float64)
        >>> model = wp.ImplicitOnlyDEQ(20, 60, gamma0=0.3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        >>> certificate = wp.certify.gao2023(model, X, y)
        >>> certificate.verdict is wp.Verdict.CERTIFIED, certificate.measured["gamma |A|"] < 1
        (False, True)
    """
    point = measured_for("gao2023", "ImplicitOnlyDEQ", model, X, y, dynamics="flow")
    if isinstance(point, Certificate):
        return point
    X, y = (tensor.detach().double().cpu() for tensor in (X, y))
    return in_range("gao2023", "flow", lambda: _reported(point, X, y))


def _reported(point: Measurement, X: Tensor, y: Tensor) -> Certificate:
    """The report; X and y as they were given."""
    twin: Any = point.model
    n, m, gamma = X.shape[0], twin.width, abs(twin.gamma)
    H = gamma**2 * (point.P @ point.P.t()) * (point.Z @ point.Z.t())
    lower, _ = gram_bounds(H)
    A = spectral_norm_upper(twin.A.detach())
    Phi = vector_norm_upper(point.C)
    R = _radius(gamma, A, Phi, point.residual, lower) if lower > 0 else None
    q = up(gamma * (A + R)) if R is not None else math.inf
    pieces = point.Z_least**2 * gamma**2 * float(point.P.square().sum(1).min())
    lower = point.unit.around((lower, lower), 2)[0]
    inverse = n / lower if lower > 0 else math.inf
    order = up(inverse * inverse * inverse * inverse)  # infinite where it overflows
    hypotheses = (
        unit_norm(X, "[gao2023, Section 2]"),
        Hypothesis.compare("labels are at most 1", "[gao2023, Section 2]", float(y.abs().max()), "<=", 1.0),
        has_signs(twin.b, "b", "[gao2023, (4)]", trained=False),
        Hypothesis.compare("the start contracts", "[gao2023, Lemma A.5]", point.contraction, "<", 1.0, note="gamma |A(0)|"),
        Hypothesis(
            "H(0) is positive definite",
            "[gao2023, Theorem 3.1]",
            lower,
            0.0,
            ">",
            # adjoints are exact only up to rounding, and masks at zero are a matter of taste: no refutation
            True if lower > 0 else None,
        ),
        Hypothesis(
            "training keeps the contraction",
            "[gao2023, proof of Theorem 3.1]",
            q if math.isfinite(q) else None,
            1.0,
            "<",
            True if q < 1 else None,
            "gamma (|A| + R), if lambda_min(H(t)) >= lambda_0/2: a premise that no printed bound proves for ReLU",
        ),
        Hypothesis(
            "the network is wide",
            "[gao2023, Theorem 3.1]",
            float(m),
            order,
            ">=",
            None,
            "an order, up to 1/delta: its constant is not stated",
        ),
    )
    measured = {
        "lambda_min(H(0))": lower,
        "|A|/sqrt(m)": A / math.sqrt(m),
        "gamma |A|": point.contraction,
        "|Phi|_F": point.unit.upper(Phi),
        "|r|": point.unit.upper(point.residual),
        "least |p|^2 lambda_min(Z Z^T) gamma^2": point.unit.lower(max(0.0, down(pieces)), 2),
        "width, order n^4/lambda_0^4": order,
    }
    if R is not None:
        measured["R, if lambda_min(H(t)) >= lambda_0/2"] = R
    note = (
        "The constants of the theorem are not stated, and its bound of H(t) - H(0) ignores changes of the masks, so it "
        "certifies nothing. The rate it promises for |r| is lambda_min(H(0))/2."
    )
    return report("gao2023", "flow", hypotheses, measured, errors_of(point), note)


def _radius(gamma: float, A: float, Phi: float, r: float, least: float) -> float | None:
    """The least R >= 2 gamma |Phi|_F |r|/(lambda_0 (1 - q)^2), by upward iteration; None if there
    is none."""
    R = 0.0
    for _ in range(_ROUNDS):
        q = gamma * (A + R)
        if q >= 1:
            return None
        needed = 2 * gamma * Phi * r / (least * (1 - q) ** 2)
        if needed <= R:
            return R
        R = up(needed * (1 + 1e-9))
    return None
