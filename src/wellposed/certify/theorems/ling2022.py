"""Theorem 1 of [ling2022]: gradient descent on `GaussianDEQ` converges if the read-out is small and
the features large."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from wellposed.certify.certificate import Certificate, Verdict, finish, in_range
from wellposed.certify.measurement import Measurement
from wellposed.certify.theorems._conditions import Condition, Radii, Theorem, errors_of, measured_for, root_rate
from wellposed.errors import InvalidArgument
from wellposed.linalg import spectral_norm_upper
from wellposed.linalg.directed import (
    DataUnit,
    down,
    least_singular_value_upper,
    spectral_norm_lower,
    up,
    vector_norm_lower,
    vector_norm_upper,
)

PRINTED, SUPPORTED = 4.0, 8.0
#: The step must be strictly below its bound.
_BELOW = 0.999


@dataclass(frozen=True)
class _Norms:
    """|W|, |U|, |a|, |X|_F, |r|, lambda_0 = lambda_min(Z Z^T), and the constant of (9)."""

    W: float
    U: float
    a: float
    X: float
    r: float
    least: float
    constant: float

    def factors(self, radii: Radii) -> tuple[float, float, float]:
        """c_w, c_u, c_a: gradients are at most c |X|_F |r| within the radii; infinite where
        contraction ends."""
        W, U, a = self.W + radii["W"], self.U + radii["U"], self.a + radii["a"]
        if W >= 1:
            return math.inf, math.inf, math.inf
        return U * a / (1 - W) ** 2, a / (1 - W), U / (1 - W)

    def C(self, radii: Radii) -> float:
        """(c_w^2 + c_u^2) |X|_F^2: the features move by at most eta C |r|/|a| in a step."""
        w, u, _ = self.factors(radii)
        return (w**2 + u**2) * self.X**2

    def E(self, radii: Radii) -> float:
        """(c_w^2 + c_u^2 + c_a^2) |X|_F^2: the predictions move by at most eta E |r| in a step."""
        return self.C(radii) + (self.factors(radii)[2] * self.X) ** 2


def ling2022(model: Any, X: Tensor, y: Tensor, *, constant: float = SUPPORTED) -> Certificate:
    r"""[ling2022, Theorem 1] at the present parameters of a `GaussianDEQ`.

    With radii d_W, d_U, d_a, rho = |.| + d and c_w = rho_u rho_a/(1 - rho_w)^2, c_u = rho_a/(1 -
    rho_w), c_a = rho_u/(1 - rho_w), C = (c_w^2 + c_u^2)|X|_F^2, E = C + c_a^2 |X|_F^2 and lambda_0
    = lambda_min(Z Z^T), Condition 1 is

        (7)  lambda_0 >= 4 |X|_F |r| max(c_w/d_W, c_u/d_U, c_a/d_a)
        (8)  lambda_0^(3/2) >= 4 (2 + sqrt 2) C |r|/rho_a
        (9)  lambda_0 >= 8 C

    and licenses steps eta < min(2/lambda_0, 2 C/E^2): the radii are never left, so |W| < 1
    throughout, lambda_min(Z Z^T) stays above lambda_0/2, and |r_k|^2 <= (1 - eta lambda_0/2)^k
    |r_0|^2. The paper's rate is that of the loss; `Certificate.rate` is its square root, the rate
    of |r|.

    *Proof.* Within the radii the gradients are at most c |X|_F |r|, and eta sum_k |r_k| <= 4
    |r_0|/lambda_0: that is (7). The features then move by at most 4 C |r_0|/(rho_a lambda_0), and
    (8) keeps sigma_min(Z) above sqrt(lambda_0/2). In a step, r_next = r - eta Z Z^T r + (Z_next -
    Z) a_next, the last term at most eta C |r| and the whole change at most eta E |r|, so

        |r_next|^2 <= (1 - eta lambda_0 + 2 eta C + eta^2 E^2) |r|^2

    which is at most 1 - eta lambda_0/2 if eta E^2 <= lambda_0/2 - 2 C; with lambda_0 >= c C it
    suffices that eta <= (c/2 - 2) C/E^2.

    Two departures. The paper prints 4 for the constant c of (9), which leaves no step where it
    holds with equality; 8 is what its own step bound needs. And it has one radius for all
    parameters; ours are separate, and the least that satisfy (7).

    Args:
        model: A `GaussianDEQ`.
        X: (n, d). y: (n,).
        constant: c, above 4. A larger one is harder to satisfy and licenses larger steps.

    Examples:
        >>> import torch, wellposed as wp
        >>> X, y = wp.data.load("sphere", n=3, features=20, norm="sqrt_d", dtype=torch.float64)
        >>> model = wp.GaussianDEQ(20, 60, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        >>> certificate = wp.certify.ling2022(model, X, y)
        >>> certificate.verdict
        <Verdict.VIOLATED: 'violated'>
        >>> [(h.equation, h.holds) for h in certificate.hypotheses]
        [('[ling2022, (7)]', False), ('[ling2022, (8)]', False), ('[ling2022, (9)] with 8', False)]
    """
    if not constant > PRINTED or not math.isfinite(constant):
        raise InvalidArgument(
            f"ling2022: constant must be above 4, got {constant!r}. With the printed 4 the proof only shows that the loss does "
            "not grow; 8 supports the printed step size."
        )
    point = measured_for("ling2022", "GaussianDEQ", model, X, y, dynamics="descent", trains=("W", "U", "a"))
    if isinstance(point, Certificate):
        return point

    def make() -> Certificate:
        harmful, helpful = _numbers(point, constant)
        judgement = _theorem(constant, point.unit).judge(harmful, helpful)
        return _certificate(point, harmful, judgement.radii, judgement.hypotheses, judgement.verdict)

    return in_range("ling2022", "descent", make)


def _numbers(point: Measurement, constant: float) -> tuple[_Norms, _Norms]:
    W, U, a = (getattr(point.model, name).detach() for name in ("W", "U", "a"))
    wide = point.Z.shape[0] <= point.Z.shape[1]
    upper = up(least_singular_value_upper(point.Z) + point.z_error_F) if wide else 0.0
    a_upper, least = vector_norm_upper(a), max(0.0, down(point.Z_least**2))
    harmful = _Norms(point.contraction, spectral_norm_upper(U), a_upper, point.X_norm_F, point.residual, least, constant)
    helpful = _Norms(
        spectral_norm_lower(W),
        spectral_norm_lower(U),
        vector_norm_lower(a),
        vector_norm_lower(point.X),
        max(0.0, down(vector_norm_lower(point.r) - point.r_error)),
        up(upper**2),
        constant,
    )
    return harmful, helpful


def _need(numbers: _Norms, radii: Radii) -> Radii | None:
    """What (7) asks of the radii."""
    if numbers.W + radii["W"] >= 1 or numbers.least <= 0:
        return None
    path = 4 * numbers.X * numbers.r / numbers.least
    return {name: path * factor for name, factor in zip(("W", "U", "a"), numbers.factors(radii), strict=True)}


def _scale(numbers: _Norms) -> Radii:
    return {"W": max(0.0, 1 - numbers.W), "U": numbers.U, "a": max(numbers.a, 1.0)}


def _seven(numbers: _Norms, radii: Radii) -> float:
    sides = zip(numbers.factors(radii), (radii["W"], radii["U"], radii["a"]), strict=True)
    return 4 * numbers.X * numbers.r * max(0.0 if factor == 0 else factor / max(radius, 1e-300) for factor, radius in sides)


def _theorem(constant: float, unit: DataUnit) -> Theorem[_Norms]:
    return Theorem(
        _need,
        _scale,
        Condition("the radii are never left", "[ling2022, (7)]", lambda point: point.least, _seven, power=2),
        (
            Condition(
                "lambda_min stays above half",
                "[ling2022, (8)]",
                lambda point: point.least**1.5,
                # C/rho_a written without the division: rho_a may be 0
                lambda point, radii: 4 * (2 + math.sqrt(2)) * _eight(point, radii) * point.X**2 * point.r,
                power=3,
            ),
            Condition(
                "the features move slowly",
                f"[ling2022, (9)] with {constant:g}",
                lambda point: point.least,
                lambda point, radii: point.constant * point.C(radii),
                power=2,
            ),
        ),
        unit,
    )


def _eight(point: _Norms, radii: Radii) -> float:
    """(c_w^2 + c_u^2)/rho_a."""
    W, U, a = point.W + radii["W"], point.U + radii["U"], point.a + radii["a"]
    return math.inf if W >= 1 else a * (U**2 / (1 - W) ** 4 + 1 / (1 - W) ** 2)


def _certificate(point: Measurement, numbers: _Norms, radii: Radii, hypotheses: Any, verdict: Verdict) -> Certificate:
    n = point.X.shape[0]
    C, E = up(numbers.C(radii)), up(numbers.E(radii))
    limit = max(0.0, (1 - numbers.W) / math.sqrt(numbers.constant * n))
    measured = {
        "lambda_0": point.unit.lower(numbers.least, 2),
        "|W|": numbers.W,
        "|U|": numbers.U,
        "|a|": numbers.a,
        "|X|_F": point.unit.upper(numbers.X),
        "|r|": point.unit.upper(numbers.r),
        "|a| that (9) allows at most": limit,
        "lambda_0/(4 C), the printed (9)": numbers.least / (PRINTED * C) if C > 0 else math.inf,
    }
    errors = errors_of(point)
    bound = down(min(2 / numbers.least, (numbers.constant / 2 - 2) * C / E**2)) if numbers.least > 0 and E > 0 else 0.0
    fitted = not bool(point.r.any())
    if verdict is Verdict.CERTIFIED and bound > 0 and not fitted:
        step, limit_of_steps = _BELOW * bound, point.unit.exact(bound, -2)
        return finish(
            "ling2022",
            verdict,
            hypotheses,
            "descent",
            step_size=_BELOW * limit_of_steps,
            rate=root_rate(step * numbers.least / 2),
            radii=radii,
            licenses=(
                f"Gradient descent with any step below {limit_of_steps:.4g} on all parameters converges to zero loss: |r_k| <= "
                "rate^k |r_0|, where rate = sqrt(1 - step lambda_0/2) (the paper's rate is that of the loss).",
                "No parameter leaves its radius, so |W| < 1 and the equilibrium is unique in every step; "
                "lambda_min(Z Z^T) stays above lambda_0/2.",
            ),
            measured=measured,
            errors=errors,
            note=f"The step size given is {_BELOW:g} of its bound.",
        )
    if verdict is Verdict.CERTIFIED:
        verdict, note = Verdict.UNDECIDED, "The hypotheses hold, but license no step: the residual is 0 already."
    else:
        note = _why_not(numbers, limit, n)
    return Certificate("ling2022", verdict, hypotheses, "descent", licenses=(), measured=measured, errors=errors, note=note)


def _why_not(numbers: _Norms, limit: float, n: int) -> str:
    if numbers.least <= 0:
        return "lambda_min(Z Z^T) is not known to be positive: take more units than samples, and no two samples alike."
    if numbers.a > limit:
        return (
            f"(9) needs |a| <= (1 - |W|)/sqrt({numbers.constant:g} n) = {limit:.3g}, because lambda_0 <= |U|^2 |X|_F^2/(n "
            f"(1 - |W|)^2); here |a| = {numbers.a:.3g}. Under the paper's own initialization |a| is about 1, so (9) can "
            "never hold, at any width. "
            "Start with a = 0 and scale U up (or the labels down)."
        )
    return (
        f"|a| = {numbers.a:.3g} is within the {limit:.3g} that (9) allows with {n} samples; what is missing is size: scale "
        "U up (or the labels down), or take more units."
    )
