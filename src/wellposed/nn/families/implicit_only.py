"""The network of [gao2023], of which only the implicit layer is trained."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from wellposed._checks import check_interval
from wellposed.errors import InvalidArgument, did_you_mean
from wellposed.nn.families._contraction import AbstractContraction
from wellposed.nn.families._network import signs
from wellposed.nn.families.theory import Theory
from wellposed.nn.tangent import TangentFeatures, outer

INITS = ("gaussian", "half_normal", "diagonal")
#: How often a Gaussian A is drawn before gamma0 is reported to be too large.
_DRAWS = 20


class ImplicitOnlyDEQ(AbstractContraction):
    r"""z = relu(gamma A^T z + phi), phi = relu(W^T x), y = b . z/sqrt(m), gamma = gamma0/sqrt(m)
    [gao2023, eq. (1)-(3)].

    Only A is a parameter; W and b are buffers, W_ij ~ N(0, 1) and b_i = +-1. In rows, Z =
    relu(gamma Z A + Phi).

    `init` chooses A(0):

    - "gaussian": A_ij ~ N(0, 1), drawn again until gamma |A| < 1. |A| is about 2 sqrt(m) (the paper
      says without loss of generality 1), so gamma0 must be below 1/2, and below 1/3 if A may move
      by sqrt(m) in training.
    - "half_normal": A_ij = |N(0, 1)|/sqrt(m). The paper has no 1/sqrt(m); then gamma |A| = gamma0
      sqrt(2m/pi), and there is no equilibrium at all for m > pi/(2 gamma0^2). Scaled, gamma |A|
      tends to gamma0 sqrt(2/pi), every unit is active, and Z = Phi (I - gamma A)^(-1) as the paper
      wants.
    - "diagonal": A = diag(N(0, 1)).

    Tangent kernel, with p_i = D_i (I - gamma A D_i)^(-1) b:  H = (gamma^2/m) (P P^T) o (Z Z^T).

    Args:
        in_features: d.
        width: m.
        gamma0: Positive.
        init: See above.
        generator: Of the initialization.
        device, dtype: Of the parameters.
        options: `solver`, `gradient`, `on_failure`, `rtol`, `max_steps` as in `EquilibriumLayer`;
            `on_ill_posed` as in `AbstractContraction`.

    Attributes:
        A: (m, m), the only parameter. W: (d, m), b: (m,) buffers. gamma: gamma0/sqrt(m).

    Examples:
        >>> import torch, wellposed as wp
        >>> model = wp.ImplicitOnlyDEQ(4, 32, gamma0=0.4, generator=torch.Generator().manual_seed(0))
        >>> model(torch.ones(8, 4)).shape, [name for name, _ in model.named_parameters()]
        (torch.Size([8]), ['A'])
    """

    W: Tensor
    b: Tensor

    def __init__(
        self,
        in_features: int,
        width: int,
        *,
        gamma0: float = 0.5,
        init: str = "gaussian",
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(in_features, width, **options)
        check_interval("ImplicitOnlyDEQ", "gamma0", gamma0, low=0.0)
        if init not in INITS:
            hint = did_you_mean(str(init), INITS)
            raise InvalidArgument(f"init of ImplicitOnlyDEQ must be one of {', '.join(INITS)}; got {init!r}.{hint}")
        self.gamma0, self.init, self.gamma = gamma0, init, gamma0 / math.sqrt(width)
        draw: dict[str, Any] = {"generator": generator, "device": device, "dtype": dtype}
        self.A = nn.Parameter(self._draw(draw))
        self.register_buffer("W", torch.randn(in_features, width, **draw))
        self.register_buffer("b", signs(width, **draw))

    def _draw(self, draw: dict[str, Any]) -> Tensor:
        m = self.width
        if self.init == "diagonal":
            return torch.diag(torch.randn(m, **draw))
        if self.init == "half_normal":
            return torch.randn(m, m, **draw).abs() / math.sqrt(m)
        for _ in range(_DRAWS):
            A = torch.randn(m, m, **draw)
            if A.is_meta:  # a shape without numbers, as `from_pretrained` asks for
                return A
            norm = self.gamma * float(torch.linalg.matrix_norm(A.float() if A.dtype.itemsize < 4 else A, ord=2))
            if norm < 1 or self.on_ill_posed != "raise":
                return A
        raise InvalidArgument(
            f"ImplicitOnlyDEQ: gamma0 = {self.gamma0:g} is too large for a Gaussian A of width {m}: gamma |A| = {norm:.3g} "
            f"in the last of {_DRAWS} draws, and must be below 1. Take gamma0 below 1/2 (1/3 leaves room for training), "
            "init='half_normal' or 'diagonal', or on_ill_posed='warn'."
        )

    @property
    def theory(self) -> Theory:
        return Theory(
            "A",
            "W",
            ("b",),
            fixed=("W", "b"),
            recurrent_scale=self.gamma,
            readout_scale=1 / math.sqrt(self.width),
            transposed=True,
            rectified=True,
            homogeneous=True,
            theorem="gao2023",
            limit=("diagonal", self.gamma0) if self.init == "diagonal" else None,
        )

    def input_matrix(self) -> Tensor:
        return self.W.t()

    def recurrent(self) -> Tensor:
        return self.A.t() * self.gamma

    def injection(self, X: Tensor) -> Tensor:
        return torch.relu(X @ self.W)

    def readout_weight(self) -> Tensor:
        return self.b / math.sqrt(self.width)

    def _tangent(self, X: Tensor, C: Tensor, Z: Tensor, P: Tensor) -> TangentFeatures:
        # P here carries the 1/sqrt(m) of the read-out: gamma^2 instead of gamma^2/m
        return TangentFeatures({"Z": Z, "P": P}, {"A": outer("P", "Z", self.gamma**2)})

    def _remedy(self) -> str:
        return "Take a smaller gamma0 (below 1/3 leaves room for A to move), or train with a smaller step"

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, gamma0={self.gamma0}, init={self.init!r}"
