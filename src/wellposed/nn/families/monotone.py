"""The dense monotone equilibrium network of [nguyen2022]."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from wellposed._tree import LOW_PRECISION
from wellposed.implicit import AbstractGradient, ImplicitGradient
from wellposed.linalg import spectral_norm_upper
from wellposed.linalg.directed import ROUNDING, down, up, vector_norm_upper
from wellposed.nn.activations import ReLU
from wellposed.nn.families._network import AbstractNetwork
from wellposed.nn.families.theory import Theory
from wellposed.nn.maps.affine import OperatorMap
from wellposed.nn.maps.operator import MonotoneOperator, OperatorCache
from wellposed.nn.parametrizations import Monotone
from wellposed.nn.sensitivity import AbstractSensitivity, DescentBounds
from wellposed.nn.tangent import GramProduct, TangentFeatures, gram, outer
from wellposed.solve import AbstractSolver, PeacemanRachford


class MonotoneDEQ(AbstractNetwork):
    r"""z = relu(W z + U x), W = (1 - m) I - A^T A + B - B^T, y = u . z [nguyen2022, Definition
    3.2.1].

    Well-posed for every A and B, because sym(I - W) >= m > 0; |W| may be anything, so splitting
    solvers are used. Starts from A_ij, B_ij ~ N(0, 1/(4 width)), U_ij ~ N(0, 2/d), u_i ~ N(0,
    1/width); the thesis leaves this open.

    Tangent kernel, with p_i = D_i (I - W^T D_i)^(-1) u and, in rows, AP = P A^T, AZ = Z A^T, G = Z
    Z^T:

        K_A = (AP AP^T) o G + (AZ AZ^T) o (P P^T) + (AP AZ^T) o (Z P^T) + (AZ AP^T) o (P Z^T)
        K_B = 2 [(P P^T) o G - (P Z^T) o (Z P^T)],   K_U = (P P^T) o (X X^T),   K_u = G

    ([nguyen2022, Prop. 4] prints J^T J, of the wrong shape, and u^T kron I for I kron u^T).

    Args:
        in_features: d.
        width: Number of units (the letter m is the margin here).
        margin: m, positive.
        solver: `PeacemanRachford(step_size=None)` if not given: the step 1/|I - W|, bounded
            rigorously.
        gradient: `ImplicitGradient` with the solver if neither is given: one factorization per
            value of A and B serves every sample, forward and backward.
        generator: Of the initialization.
        device, dtype: Of the parameters.
        max_steps: As in `EquilibriumLayer`; splittings take more steps than a contraction.
        options: `on_failure`, `rtol` as in `EquilibriumLayer`.

    Attributes:
        A: (width, width). B: (width, width). U: (width, d). u: (width,).

    Examples:
        >>> import torch, wellposed as wp
        >>> model = wp.MonotoneDEQ(4, 32, margin=0.1, generator=torch.Generator().manual_seed(0))
        >>> model(torch.ones(8, 4)).shape
        torch.Size([8])
        >>> wp.certify(model).verdict
        <Verdict.CERTIFIED: 'certified'>
    """

    def __init__(
        self,
        in_features: int,
        width: int,
        *,
        margin: float = 0.1,
        solver: AbstractSolver | None = None,
        gradient: AbstractGradient | None = None,
        max_steps: int = 1000,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        if solver is None:
            solver = PeacemanRachford(step_size=None)
            gradient = ImplicitGradient(solver) if gradient is None else gradient
        super().__init__(in_features, width, solver=solver, gradient=gradient, max_steps=max_steps, **options)
        self._cache = OperatorCache()
        self.parametrization = Monotone(margin)
        draw: dict[str, Any] = {"generator": generator, "device": device, "dtype": dtype}
        self.A = nn.Parameter(torch.randn(width, width, **draw) / (2 * math.sqrt(width)))
        self.B = nn.Parameter(torch.randn(width, width, **draw) / (2 * math.sqrt(width)))
        self.U = nn.Parameter(torch.randn(width, in_features, **draw) * math.sqrt(2 / in_features))
        self.u = nn.Parameter(torch.randn(width, **draw) / math.sqrt(width))

    @property
    def margin(self) -> float:
        """m, that of the parametrization; checked when it is assigned."""
        return self.parametrization.margin

    @margin.setter
    def margin(self, margin: float) -> None:
        self.parametrization.margin = margin

    @property
    def theory(self) -> Theory:
        return Theory(
            injected="U", readout=("u",), margin=self.margin, homogeneous=True, theorem="nguyen2022", options=("margin",)
        )

    def sensitivity(self, measurement: Any) -> MonotoneSensitivity:
        """The bounds of the radius certificate."""
        return MonotoneSensitivity(measurement)

    def recurrent_error(self) -> float:
        A, B = vector_norm_upper(self.A), vector_norm_upper(self.B)
        size = vector_norm_upper(self.recurrent()) + A * A + 2 * B + (1 + self.margin) * math.sqrt(self.width)
        return up(2 * (self.width + 8) * ROUNDING * size)

    def recurrent(self) -> Tensor:
        W: Tensor = self.parametrization(self.A, self.B)
        return W

    def bind(self, C: Tensor) -> OperatorMap:
        low = C.dtype in LOW_PRECISION
        A, B, C = (self.A.float(), self.B.float(), C.float()) if low else (self.A, self.B, C)
        return OperatorMap(MonotoneOperator(A, B, self.margin, self._cache), C, ReLU())

    def injection(self, X: Tensor) -> Tensor:
        return X @ self.U.t()

    def readout_weight(self) -> Tensor:
        return self.u

    def _tangent(self, X: Tensor, C: Tensor, Z: Tensor, P: Tensor) -> TangentFeatures:
        A = self.A.to(Z.dtype)
        features = {"Z": Z, "P": P, "AZ": Z @ A.t(), "AP": P @ A.t(), "X": X}
        # dy/dA = -A (p z^T + z p^T), dy/dB = p z^T - z p^T
        mixed = (GramProduct((("AP", "AZ"), ("Z", "P"))), GramProduct((("AZ", "AP"), ("P", "Z"))))
        terms = {
            "A": (*outer("AP", "Z"), *outer("AZ", "P"), *mixed),
            "B": (*outer("P", "Z", 2.0), GramProduct((("P", "Z"), ("Z", "P")), -2.0)),
            "U": outer("P", "X"),
            "u": gram("Z"),
        }
        return TangentFeatures(features, terms)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, margin={self.margin}"


class MonotoneSensitivity(AbstractSensitivity):
    r"""z = relu(W z + U x), W = (1 - m) I - A^T A + B - B^T, y = u . z.

    Two equilibria satisfy m |z' - z| <= |dW z + dU x| for the *same* margin m everywhere
    [nguyen2022, Lemma 3.3.4], so with samples in rows, beta = |Z| and b = |X|,

        |Z' - Z|_F <= (|dW|_F beta + |dU|_F b)/m,     |dW|_F <= 2 |A| |dA|_F + |dA|_F^2 + 2 |dB|_F.

    The masked adjoint has |p_i| <= |u|/m [nguyen2022, Lemma 3.3.2, which needs the mask].

    Args:
        point: The measurement of a `MonotoneDEQ`.
    """

    readout = ("u",)
    hidden = ("A", "B", "U")

    def __init__(self, point: Any) -> None:
        model = point.model
        self._at, self.residual = point, point.residual
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
        point = self._at
        unit = point.unit
        numbers = {"loss": point.loss, "|r|": unit.upper(point.residual), "margin": self._m, "|A|": self._A, "|u|": self._u}
        return numbers | {
            "sigma_min(Z)": unit.lower(point.Z_least),
            "|Z|": unit.upper(point.Z_norm),
            "|X|": unit.upper(point.X_norm),
        }

    def errors(self) -> dict[str, float]:
        return self._at.errors()
