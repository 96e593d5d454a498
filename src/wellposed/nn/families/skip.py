"""The ReLU implicit network with a feature path of [gao2022]."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from wellposed._checks import check_interval
from wellposed.nn.families._contraction import AbstractContraction
from wellposed.nn.families._network import signs
from wellposed.nn.families.theory import Theory
from wellposed.nn.tangent import TangentFeatures, gram, outer


class SkipDEQ(AbstractContraction):
    r"""phi = relu(W x)/sqrt(m), z = relu(gamma/sqrt(m) A z + phi), y = u . z + v . phi [gao2022,
    eq. (1)-(4)].

    Starts from A_ij, W_ij ~ N(0, 1) and u_i, v_i = +-1. Well-posed while gamma |A|/sqrt(m) < 1; |A|
    is about 2 sqrt(m) at the start, so gamma must be below 1/2, and below 1/4 if |A| may double in
    training.

    Tangent kernel, with p_i = D_i (I - g A^T D_i)^(-1) u, g = gamma/sqrt(m), E the masks of W x:

        H = (gamma^2/m P P^T + 1 1^T) o Z Z^T + 1/m [E o (P + 1 v^T)] [E o (P + 1 v^T)]^T o X X^T + Phi Phi^T

    ([gao2022, eq. (10)] lost the factor g in the gradient with respect to A; its appendix (27) has
    it).

    Args:
        in_features: d.
        width: m.
        gamma: Positive.
        generator: Of the initialization.
        device, dtype: Of the parameters.
        options: `solver`, `gradient`, `on_failure`, `rtol`, `max_steps` as in `EquilibriumLayer`;
            `on_ill_posed` as in `AbstractContraction`.

    Attributes:
        A: (m, m). W: (m, d). u: (m,). v: (m,).

    Examples:
        >>> import torch, wellposed as wp
        >>> model = wp.SkipDEQ(4, 32, generator=torch.Generator().manual_seed(0))
        >>> X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
        >>> model(X).shape, model.equilibrium(X).shape
        (torch.Size([8]), torch.Size([8, 32]))
    """

    def __init__(
        self,
        in_features: int,
        width: int,
        *,
        gamma: float = 0.2,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(in_features, width, **options)
        check_interval("SkipDEQ", "gamma", gamma, low=0.0)
        self.gamma = gamma
        draw: dict[str, Any] = {"generator": generator, "device": device, "dtype": dtype}
        self.A = nn.Parameter(torch.randn(width, width, **draw))
        self.W = nn.Parameter(torch.randn(width, in_features, **draw))
        self.u = nn.Parameter(signs(width, **draw))
        self.v = nn.Parameter(signs(width, **draw))

    @property
    def theory(self) -> Theory:
        root = math.sqrt(self.width)
        return Theory(
            "A",
            "W",
            ("u", "v"),
            recurrent_scale=self.gamma / root,
            injection_scale=1 / root,
            rectified=True,
            homogeneous=True,
            theorem="gao2022",
            options=("gamma",),
        )

    def recurrent(self) -> Tensor:
        return self.A * (self.gamma / math.sqrt(self.width))

    def injection(self, X: Tensor) -> Tensor:
        return torch.relu(X @ self.W.t()) / math.sqrt(self.width)

    def readout_weight(self) -> Tensor:
        return self.u

    def readout(self, Z: Tensor, C: Tensor) -> Tensor:
        return Z @ self.u + C @ self.v

    def _tangent(self, X: Tensor, C: Tensor, Z: Tensor, P: Tensor) -> TangentFeatures:
        through = (P + self.v) * (C > 0)  # dy/dphi, where phi is not cut off
        features = {"Z": Z, "P": P, "Phi": C, "E(P+v)": through, "X": X}
        terms = {
            "A": outer("P", "Z", self.gamma**2 / self.width),
            "W": outer("E(P+v)", "X", 1 / self.width),
            "u": gram("Z"),
            "v": gram("Phi"),
        }
        return TangentFeatures(features, terms)

    def _remedy(self) -> str:
        return "Take a smaller gamma (below 1/4 leaves room for |A| to double), or train with a smaller step"

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, gamma={self.gamma}"
