"""The dense monotone equilibrium network of [nguyen2022]."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from wellposed._tree import LOW_PRECISION
from wellposed.implicit import AbstractGradient, ImplicitGradient
from wellposed.nn.activations import ReLU
from wellposed.nn.families._network import AbstractNetwork, gram, outer
from wellposed.nn.maps.affine import OperatorMap
from wellposed.nn.maps.operator import MonotoneOperator, OperatorCache
from wellposed.nn.parametrizations import Monotone
from wellposed.nn.tangent import GramProduct, TangentFeatures
from wellposed.solve import AbstractSolver, PeacemanRachford

__all__ = ["MonotoneDEQ"]


class MonotoneDEQ(AbstractNetwork):
    r"""z = relu(W z + U x), W = (1 - m) I - A^T A + B - B^T, y = u . z [nguyen2022, Definition 3.2.1].

    Well-posed for every A and B, because sym(I - W) >= m > 0; |W| may be anything, so splitting solvers are used.
    Starts from A_ij, B_ij ~ N(0, 1/(4 width)), U_ij ~ N(0, 2/d), u_i ~ N(0, 1/width); the thesis leaves this open.

    Tangent kernel, with p_i = D_i (I - W^T D_i)^(-1) u and, in rows, AP = P A^T, AZ = Z A^T, G = Z Z^T:

        K_A = (AP AP^T) o G + (AZ AZ^T) o (P P^T) + (AP AZ^T) o (Z P^T) + (AZ AP^T) o (P Z^T)
        K_B = 2 [(P P^T) o G - (P Z^T) o (Z P^T)],   K_U = (P P^T) o (X X^T),   K_u = G

    ([nguyen2022, Prop. 4] prints J^T J, of the wrong shape, and u^T kron I for I kron u^T).

    Args:
        in_features: d.
        width: Number of units (the letter m is the margin here).
        margin: m, positive.
        solver: `PeacemanRachford(step_size=None)` if not given: the step 1/|I - W|, bounded rigorously.
        gradient: `ImplicitGradient` with the solver if neither is given: one factorization per value of A and B serves every
            sample, forward and backward.
        generator: Of the initialization.
        device, dtype: Of the parameters.
        max_steps: As in `EquilibriumLayer`; splittings take more steps than a contraction.
        options: `on_failure`, `rtol` as in `EquilibriumLayer`.

    Attributes:
        A: (width, width). B: (width, width). U: (width, d). u: (width,).
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
        self.margin = margin
        draw: dict[str, Any] = {"generator": generator, "device": device, "dtype": dtype}
        self.A = nn.Parameter(torch.randn(width, width, **draw) / (2 * math.sqrt(width)))
        self.B = nn.Parameter(torch.randn(width, width, **draw) / (2 * math.sqrt(width)))
        self.U = nn.Parameter(torch.randn(width, in_features, **draw) * math.sqrt(2 / in_features))
        self.u = nn.Parameter(torch.randn(width, **draw) / math.sqrt(width))

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
