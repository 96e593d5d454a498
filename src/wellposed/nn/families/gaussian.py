"""The Gaussian ReLU equilibrium network of [ling2022]."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from wellposed._checks import check_interval
from wellposed.errors import InvalidType
from wellposed.nn.activations import AbstractActivation, ReLU
from wellposed.nn.families._contraction import AbstractContraction
from wellposed.nn.families.theory import Theory
from wellposed.nn.tangent import TangentFeatures, gram, outer


class GaussianDEQ(AbstractContraction):
    r"""z = relu(W z + U x), y = a . z [ling2022, eq. (1)-(2)]; or with another activation than
    relu.

    Starts from W_ij ~ N(0, 2 s/m), U_ij ~ N(0, 2/d), a_i ~ N(0, 1/m) with s = `weight_variance`
    (Assumption 1, which asks for s < 1/8 and inputs of norm sqrt(d)); |W| is then about 2 sqrt(2
    s). Well-posed while |W| < 1.

    Tangent kernel, with p_i = D_i (I - W^T D_i)^(-1) a:  H = G + (P P^T) o (G + X X^T),  G = Z Z^T.

        >>> import torch, wellposed as wp
        >>> model = wp.GaussianDEQ(4, 32)
        >>> model(torch.randn(8, 4)).shape
        torch.Size([8])

    Args:
        in_features: d.
        width: m.
        weight_variance: s, at least 0.
        activation: With slopes in [0, 1]; `ReLU()`, that of the paper, if not given. `Tanh()` and
            `Softplus(centred=True)` are for `wp.prove`; theorems and kernels of the paper are for
            ReLU only.
        generator: Of the initialization.
        device, dtype: Of the parameters.
        options: `solver`, `gradient`, `on_failure`, `rtol`, `max_steps` as in `EquilibriumLayer`;
            `on_ill_posed` as in `AbstractContraction`.

    Attributes:
        W: (m, m). U: (m, d). a: (m,).
    """

    def __init__(
        self,
        in_features: int,
        width: int,
        *,
        weight_variance: float = 0.08,
        activation: AbstractActivation | None = None,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(in_features, width, **options)
        check_interval("GaussianDEQ", "weight_variance", weight_variance, low=0.0, closed="left")
        self.weight_variance = weight_variance
        if activation is not None and not isinstance(activation, AbstractActivation):
            raise InvalidType(f"activation of GaussianDEQ must be one such as wp.nn.Tanh(); got {activation!r}.")
        self.activation = activation or self.activation
        draw: dict[str, Any] = {"generator": generator, "device": device, "dtype": dtype}
        self.W = nn.Parameter(torch.randn(width, width, **draw) * math.sqrt(2 * weight_variance / width))
        self.U = nn.Parameter(torch.randn(width, in_features, **draw) * math.sqrt(2 / in_features))
        self.a = nn.Parameter(torch.randn(width, **draw) / math.sqrt(width))

    @property
    def theory(self) -> Theory:
        if not isinstance(self.activation, ReLU):
            return Theory("W", "U", ("a",), options=("weight_variance", "activation"))
        return Theory("W", "U", ("a",), homogeneous=True, theorem="ling2022", options=("weight_variance",))

    def recurrent(self) -> Tensor:
        return self.W

    def injection(self, X: Tensor) -> Tensor:
        return X @ self.U.t()

    def readout_weight(self) -> Tensor:
        return self.a

    def _tangent(self, X: Tensor, C: Tensor, Z: Tensor, P: Tensor) -> TangentFeatures:
        return TangentFeatures({"Z": Z, "P": P, "X": X}, {"W": outer("P", "Z"), "U": outer("P", "X"), "a": gram("Z")})

    def _remedy(self) -> str:
        return "Scale W down, start with a weight_variance below 1/8, or train with a smaller step"
