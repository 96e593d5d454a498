"""Sensitivities of the monotone network."""

from __future__ import annotations

import math
from collections.abc import Mapping

from wellposed.certify._directed import down, up, vector_norm_upper
from wellposed.certify._measure import Measurement
from wellposed.linalg import spectral_norm_upper
from wellposed.nn import AbstractSensitivity, DescentBounds, MonotoneDEQ

__all__ = ["MonotoneSensitivity"]


class MonotoneSensitivity(AbstractSensitivity):
    r"""z = relu(W z + U x), W = (1 - m) I - A^T A + B - B^T, y = u . z.

    Two equilibria satisfy m |z' - z| <= |dW z + dU x| for the *same* margin m everywhere [nguyen2022, Lemma 3.3.4], so with
    samples in rows, beta = |Z| and b = |X|,

        |Z' - Z|_F <= (|dW|_F beta + |dU|_F b)/m,     |dW|_F <= 2 |A| |dA|_F + |dA|_F^2 + 2 |dB|_F.

    The masked adjoint has |p_i| <= |u|/m [nguyen2022, Lemma 3.3.2, which needs the mask].

    Args:
        at: The measurement of a `MonotoneDEQ`.
    """

    readout = ("u",)
    hidden = ("A", "B", "U")

    def __init__(self, at: Measurement) -> None:
        model = at.model
        assert isinstance(model, MonotoneDEQ)
        self._at, self.residual = at, at.residual
        self._m = down(model.margin)
        self._A = spectral_norm_upper(model.A)
        self._u = vector_norm_upper(model.u)

    def least(self, R: float, h: float) -> float:
        hidden = up(math.sqrt(h) * R)
        B, b = self._at.Z_norm, self._at.X_norm
        # |dA|^2 <= hidden |dA|, then Cauchy-Schwarz over (dA, dB, dU)
        slope = math.hypot((2 * self._A + hidden) * B, 2 * B, b)
        return down(self._at.Z_least - up(hidden * slope / self._m))

    def descent(self, radii: Mapping[str, float], h: float) -> DescentBounds | None:
        B, b, m = self._at.Z_norm, self._at.X_norm, self._m
        if self._at.Z_least <= 0:
            return None
        R_A, R_B, R_U = (radii[name] for name in self.hidden)
        drift = up(((2 * self._A * R_A + R_A**2 + 2 * R_B) * B + R_U * b) / m)
        B_ball = up(B + drift)
        A_ball = up(self._A + R_A)
        u_ball = up(self._u + radii["u"])
        kappa = up(u_ball / m)  # bounds |p_i|
        # dy/dA = -A (p z^T + z p^T), dy/dB = p z^T - z p^T, dy/dU = p x^T
        gradients = {"A": up(2 * A_ball * kappa * B_ball), "B": up(2 * kappa * B_ball), "U": up(kappa * b)}
        # a step moves A by at most h eta g_A e, and eta <= 1/B'^2 <= 1/B^2
        quadratic = h * gradients["A"] * self.residual / self._at.Z_norm**2
        dW = (2 * A_ball + quadratic) * gradients["A"] + 2 * gradients["B"]
        dZ = up((dW * B_ball + gradients["U"] * b) / m)
        return DescentBounds(down(self._at.Z_least - drift), B_ball, gradients, up(u_ball * dZ))

    def measured(self) -> dict[str, float]:
        at = self._at
        unit = at.unit
        numbers = {"loss": at.loss, "|r|": unit.upper(at.residual), "margin": self._m, "|A|": self._A, "|u|": self._u}
        return numbers | {
            "sigma_min(Z)": unit.lower(at.Z_least),
            "|Z|": unit.upper(at.Z_norm),
            "|X|": unit.upper(at.X_norm),
        }

    def errors(self) -> dict[str, float]:
        return self._at.errors()
