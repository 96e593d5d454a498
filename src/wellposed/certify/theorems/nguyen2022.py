"""Theorems 3.3.1 (flow) and 3.3.5 (descent) of [nguyen2022] on `MonotoneDEQ`, corrected."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from wellposed.certify.certificate import Certificate, Verdict, finish, in_range
from wellposed.certify.measurement import Measurement
from wellposed.certify.theorems._conditions import Condition, Judgement, Radii, Theorem, errors_of, measured_for, root_rate
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

_NAMES = ("A", "B", "U", "u")
#: The step must be strictly below its bound.
_BELOW = 0.999


@dataclass(frozen=True)
class _MonotoneNorms:
    """|A|, |U|, |u|, the margin m, |X|_F, |r|, and l0 = sigma_min(Z), not its square."""

    A: float
    U: float
    u: float
    margin: float
    X: float
    r: float
    least: float

    def grown(self, radii: Radii) -> tuple[float, float, float]:
        """l_A, l_U, l_u: norms within the radii."""
        return self.A + radii["A"], self.U + radii["U"], self.u + radii["u"]

    def gradients(self, radii: Radii) -> dict[str, float]:
        """Gradients are at most this times |X|_F |r| within the radii."""
        A, U, u = self.grown(radii)
        m = self.margin
        return {"A": 2 * U * u * A / m**2, "B": 2 * U * u / m**2, "U": u / m, "u": U / m}

    def bracket(self, radii: Radii) -> float:
        """(l_u/m^2) [1 + 4 (l_A^2 + 1) l_U^2/m^2]: features move by at most |X|_F^2 |r| times
        this."""
        A, U, u = self.grown(radii)
        return u / self.margin**2 * (1 + 4 * (A**2 + 1) * U**2 / self.margin**2)

    def C_p(self, radii: Radii) -> float:
        """|X|_F^2 [l_u^2/m^2 + 4 l_U^2 l_u^2 (l_A^2 + 1)/m^4]."""
        return self.X**2 * self.bracket(radii) * (self.u + radii["u"])

    def C_11(self, radii: Radii) -> float:
        """C_p + |X|_F^2 l_U^2/m^2: predictions move by at most eta C_11 |r| in a step."""
        return self.C_p(radii) + (self.X * (self.U + radii["U"]) / self.margin) ** 2


def nguyen2022(model: Any, X: Tensor, y: Tensor, *, dynamics: str = "descent") -> Certificate:
    r"""[nguyen2022, Theorem 3.3.1] (flow) or [nguyen2022, Theorem 3.3.5] (descent, corrected), at
    the present parameters.

    With radii R, l = |.| + R, margin m, l0 = sigma_min(Z) (*not* the lambda_0 of [ling2022], which
    is its square), the flow needs

        (3.8)  l0^2 >= 4 |X|_F |r| max{2 l_U l_u l_A/(m^2 R_A), 2 l_U l_u/(m^2 R_B), l_u/(m R_U),
        l_U/(m R_u)} (3.9)  l0^3 >= 8 |X|_F^2 |r| (l_u/m^2) [1 + 4 (l_A^2 + 1) l_U^2/m^2]

    and then the loss decays like exp(-l0^2 t/2), so |r| like exp(-l0^2 t/4). Descent needs

        (3.16)   (3.8) with 8 for 4
        (3.17')  (3.9) with 16 for 8
        (3.18')  l0^2 >= 20 C_p,    C_p = |X|_F^2 [l_u^2/m^2 + 4 l_U^2 l_u^2 (l_A^2 + 1)/m^4]

    and licenses eta < 4/l0^2, eta <= 2 l0^2/(25 C_11^2) with C_11 = C_p + |X|_F^2 l_U^2/m^2:
    |r_k|^2 <= (1 - eta l0^2/4)^k |r_0|^2. In both cases the radii are never left, and sigma_min(Z)
    stays above l0/2; the equilibrium is unique wherever the parameters go.

    *Proof of the descent.* Gradients within the radii are at most |X|_F |r| times 2 l_U l_u
    l_A/m^2, 2 l_U l_u/m^2, l_u/m, l_U/m, because |Z|_F <= |X|_F l_U/m and the masked adjoints are
    at most l_u/m; and eta sum_k |r_k| <= 8 |r_0|/l0^2: that is (3.16). As |A'^T A' - A^T A| <= 2
    l_A |A' - A|, the features move by at most (8 |r_0|/l0^2) |X|_F^2 times the bracket of (3.17'),
    so sigma_min(Z) >= l0/2. In a step |r_next|^2 <= (1 - eta l0^2/2 + 2 eta C_p + eta^2 C_11^2)
    |r|^2, and 2 C_p + eta C_11^2 <= l0^2/10 + 2 l0^2/25 < l0^2/4.

    Departures: the thesis prints (3.17) and (3.18) without their powers of m, (3.17) with half its
    factor, and (3.18) with a further term l_U^2 with which, once the powers of m are back, it can
    never hold; its step bound misses lambda_max(Z Z^T), and the literal theorem is false
    (`findings/test_nguyen2022.py` runs into infinity). "Width O(N)" means width >= N.

    Args:
        model: A `MonotoneDEQ`.
        X: (n, d). y: (n,).
        dynamics: "flow" or "descent".

    Examples:
        >>> import torch, wellposed as wp
        >>> X, y = wp.data.load("sphere", n=3, features=20, norm="sqrt_d", dtype=torch.float64)
        >>> model = wp.MonotoneDEQ(20, 60, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        >>> wp.certify.nguyen2022(model, X, y, dynamics="flow").verdict
        <Verdict.VIOLATED: 'violated'>
    """
    point = measured_for("nguyen2022", "MonotoneDEQ", model, X, y, dynamics=dynamics, trains=_NAMES)
    if isinstance(point, Certificate):
        return point
    return in_range("nguyen2022", dynamics, lambda: _certificate(point, dynamics))


def _certificate(point: Measurement, dynamics: str) -> Certificate:
    harmful, helpful = _numbers(point)
    unit = point.unit
    judgement = (_flow(unit) if dynamics == "flow" else _descent(unit)).judge(harmful, helpful)
    licensed = _license(dynamics, harmful, judgement, unit) if judgement.verdict is Verdict.CERTIFIED else {}
    limit = down(harmful.margin / math.sqrt(80 * point.X.shape[0] * (harmful.A**2 + 1)))
    return finish(
        "nguyen2022",
        judgement.verdict,
        judgement.hypotheses,
        dynamics,
        measured={
            "sigma_min(Z)": unit.lower(harmful.least),
            "|A|": harmful.A,
            "|U|": harmful.U,
            "|u|": harmful.u,
            "|X|_F": unit.upper(harmful.X),
            "|r|": unit.upper(harmful.r),
            "margin": harmful.margin,
            "|u| that (3.18') allows at most": limit,
        },
        errors=errors_of(point),
        note=_note(dynamics, harmful, judgement.verdict, limit),
        **licensed,
    )


def _numbers(point: Measurement) -> tuple[_MonotoneNorms, _MonotoneNorms]:
    A, U, u = (getattr(point.model, name).detach() for name in ("A", "U", "u"))
    margin = point.model.theory.margin
    assert margin is not None
    wide = point.Z.shape[0] <= point.Z.shape[1]
    harmful = _MonotoneNorms(
        spectral_norm_upper(A),
        spectral_norm_upper(U),
        vector_norm_upper(u),
        margin,
        point.X_norm_F,
        point.residual,
        point.Z_least,
    )
    helpful = _MonotoneNorms(
        spectral_norm_lower(A),
        spectral_norm_lower(U),
        vector_norm_lower(u),
        margin,
        vector_norm_lower(point.X),
        max(0.0, down(vector_norm_lower(point.r) - point.r_error)),
        up(least_singular_value_upper(point.Z) + point.z_error_F) if wide else 0.0,
    )
    return harmful, helpful


def _scale(numbers: _MonotoneNorms) -> Radii:
    return {"A": max(numbers.A, 1.0), "B": 1.0, "U": max(numbers.U, 1.0), "u": max(numbers.u, 1.0)}


def _radii_condition(equation: str, factor: float) -> Condition[_MonotoneNorms]:
    def bound(point: _MonotoneNorms, radii: Radii) -> float:
        sides = [0.0 if g == 0 else g / max(radii[name], 1e-300) for name, g in point.gradients(radii).items()]
        return factor * point.X * point.r * max(sides)

    return Condition("the radii are never left", equation, lambda point: point.least**2, bound, power=2)


def _feature_condition(equation: str, factor: float) -> Condition[_MonotoneNorms]:
    return Condition(
        "sigma_min(Z) stays above half",
        equation,
        lambda point: point.least**3,
        lambda point, radii: factor * point.X**2 * point.r * point.bracket(radii),
        power=3,
    )


def _path(factor: float) -> Any:
    """What (3.8) or (3.16) asks of the radii."""

    def need(point: _MonotoneNorms, radii: Radii) -> Radii | None:
        if point.least <= 0:
            return None
        return {name: factor * point.X * point.r * g / point.least**2 for name, g in point.gradients(radii).items()}

    return need


def _flow(unit: DataUnit) -> Theorem[_MonotoneNorms]:
    feature = _feature_condition("[nguyen2022, (3.9)]", 8.0)
    return Theorem(_path(4.0), _scale, _radii_condition("[nguyen2022, (3.8)]", 4.0), (feature,), unit)


def _descent(unit: DataUnit) -> Theorem[_MonotoneNorms]:
    feature = _feature_condition("[nguyen2022, (3.17)] corrected", 16.0)
    slow = Condition[_MonotoneNorms](
        "the features move slowly",
        "[nguyen2022, (3.18)] corrected",
        lambda point: point.least**2,
        lambda point, radii: 20 * point.C_p(radii),
        power=2,
    )
    return Theorem(_path(8.0), _scale, _radii_condition("[nguyen2022, (3.16)]", 8.0), (feature, slow), unit)


def _license(dynamics: str, numbers: _MonotoneNorms, judgement: Judgement, unit: DataUnit) -> dict[str, Any]:
    radii = judgement.radii
    stays = "No parameter leaves its radius and sigma_min(Z) stays above half; the equilibrium is unique for all parameters."
    if dynamics == "flow":
        licenses = ("Gradient flow converges to zero loss: |r(t)| <= exp(-rate t) |r_0|, rate = sigma_min(Z)^2/4.", stays)
        rate = unit.exact(down(numbers.least**2 / 4), 2)
        return {"rate": rate, "rates": dict.fromkeys(_NAMES, 1.0), "radii": radii, "licenses": licenses}
    bound = down(min(4 / numbers.least**2, 2 * numbers.least**2 / (25 * up(numbers.C_11(radii)) ** 2)))
    step, limit_of_steps = _BELOW * bound, unit.exact(bound, -2)
    return {
        "step_size": _BELOW * limit_of_steps,
        "rate": root_rate(step * numbers.least**2 / 4),
        "radii": radii,
        "licenses": (
            f"Gradient descent with any step below {limit_of_steps:.4g} on all parameters converges to zero loss: |r_k| <= "
            "rate^k |r_0|, where rate = sqrt(1 - step sigma_min(Z)^2/4) (the thesis' rate is that of the loss).",
            stays,
        ),
    }


def _note(dynamics: str, numbers: _MonotoneNorms, verdict: Verdict, limit: float) -> str:
    if verdict is Verdict.CERTIFIED:
        return "" if dynamics == "flow" else f"The step size given is {_BELOW:g} of its bound."
    if numbers.least <= 0:
        return "sigma_min(Z) is not known to be positive: take more units than samples, and no two samples alike."
    if dynamics == "descent" and numbers.u > limit:
        return (
            f"(3.18') needs |u| <= m/sqrt(80 n (|A|^2 + 1)) = {limit:.3g}; here |u| = {numbers.u:.3g}. Start with u = 0 and "
            "scale U up. As printed, with its powers of m restored, (3.18) can never hold: its term l_U^2 alone asks for "
            "more than "
            "sigma_min(Z)^2 <= |X|_F^2 |U|^2/(m^2 n) can give."
        )
    return "What is missing is size: start with u = 0 and scale U up (or the labels down), or take more units."
