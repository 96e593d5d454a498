"""Cells: the maps f(z, x) of equilibrium layers."""

from __future__ import annotations

import abc
import math
from typing import Any

import torch
from torch import Tensor, nn

from wellposed._tree import LOW_PRECISION
from wellposed.errors import InvalidArgument, InvalidType
from wellposed.nn.activations import AbstractActivation, ReLU
from wellposed.nn.maps.affine import OperatorMap
from wellposed.nn.maps.dense import DenseMap, MonotoneOperator
from wellposed.nn.maps.operator import Memory
from wellposed.nn.parametrizations.monotone import Monotone
from wellposed.nn.parametrizations.spectral import Spectral
from wellposed.solve import AbstractMap, check_positive_integer

__all__ = ["AbstractCell", "DenseCell"]


class AbstractCell(nn.Module, abc.ABC):
    """A cell with structure: it prepares what depends on x alone once, and hands out a map of z.

    An `EquilibriumLayer` takes any module or function of (z, x); a cell of this kind is faster, because the parts that do
    not depend on z are made once per solve, products are done in place, and adjoints are known by formula.
    """

    @abc.abstractmethod
    def bind(self, x: Tensor) -> AbstractMap:
        """The map z -> f(z, x), with a graph to x and the parameters; low precision is lifted to float32."""

    @abc.abstractmethod
    def state_shape(self, x: Tensor) -> tuple[int, ...]:
        """(batch, ...) the shape of z for an input x; raises for an input that does not fit."""

    @abc.abstractmethod
    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        """f(z, x)."""


class DenseCell(AbstractCell):
    r"""f(z, x) = s(W z + U x + b).

    Starts from W_ij ~ N(0, 0.16/m) (so |W| is about 0.8: a contraction), U_ij ~ N(0, 2/d) and b = 0, the initialization
    of [ling2022] with variance 0.08.

    Args:
        in_features: d.
        width: m.
        activation: s; `ReLU()` if not given.
        weight: Keeps the recurrent matrix well-posed: `Spectral(bound=0.95)` is applied to the parameter W at every solve;
            `Monotone(margin=0.1)` makes W of parameters A and B instead, A_ij, B_ij ~ N(0, 1/(4m)) at the start. None uses
            W as it is.
        bias: Whether there is a b.
        generator: Of the initialization.
        device, dtype: Of the parameters.

    Attributes:
        W: (m, m); for `Monotone` A: (m, m) and B: (m, m). U: (m, d). b: (m,) or None.
    """

    A: Tensor  # only with Monotone
    B: Tensor

    def __init__(
        self,
        in_features: int,
        width: int,
        activation: AbstractActivation | None = None,
        *,
        weight: Spectral | Monotone | None = None,
        bias: bool = True,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_positive_integer("DenseCell", "in_features", in_features)
        check_positive_integer("DenseCell", "width", width)
        activation = ReLU() if activation is None else activation
        if not isinstance(activation, AbstractActivation):
            raise InvalidType(
                f"The 'activation' parameter of DenseCell must be one of wellposed.nn, such as wp.nn.ReLU(); "
                f"got {type(activation).__module__}.{activation!r}."
            )
        if not isinstance(weight, (Spectral, Monotone, type(None))):
            raise InvalidType(
                f"The 'weight' parameter of DenseCell must be Spectral(...), Monotone(...) or None; got {weight!r}. "
                "For a parametrization of your own, torch.nn.utils.parametrize.register_parametrization(cell, 'W', ...)."
            )
        self.in_features, self.width, self.activation = in_features, width, activation
        self.weight = weight
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        if isinstance(weight, Monotone):
            for name in ("A", "B"):
                start = torch.randn(width, width, generator=generator, **options) / math.sqrt(4 * width)
                self.register_parameter(name, nn.Parameter(start))
        else:
            self.W = nn.Parameter(torch.randn(width, width, generator=generator, **options) * math.sqrt(0.16 / width))
        self.U = nn.Parameter(torch.randn(width, in_features, generator=generator, **options) * math.sqrt(2 / in_features))
        self.b = nn.Parameter(torch.zeros(width, **options)) if bias else None
        self._memory = Memory()

    def recurrent(self) -> Tensor:
        """(m, m) the matrix that multiplies z: W, as its parametrization makes it."""
        if isinstance(self.weight, Monotone):
            W: Tensor = self.weight(self.A, self.B)
            return W
        return self.W if self.weight is None else self.weight(self.W)

    def bind(self, x: Tensor) -> OperatorMap:
        U, b = self.U, self.b
        lift = U.dtype in LOW_PRECISION or x.dtype in LOW_PRECISION

        def lifted(parameter: Tensor) -> Tensor:
            return parameter.float() if lift else parameter

        c = nn.functional.linear(lifted(x), lifted(U), None if b is None else lifted(b))
        if isinstance(self.weight, Monotone):
            operator = MonotoneOperator(lifted(self.A), lifted(self.B), self.weight.margin, self._memory)
            return OperatorMap(operator, c, self.activation)
        return DenseMap(lifted(self.recurrent()), c, self.activation, self._memory)

    def state_shape(self, x: Tensor) -> tuple[int, ...]:
        if not isinstance(x, Tensor) or x.dim() != 2 or x.shape[1] != self.in_features:
            seen = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise InvalidArgument(f"DenseCell expects x of shape (batch, {self.in_features}); got {seen}.")
        if _solved_in(x.dtype) != _solved_in(self.U.dtype):
            raise InvalidType(
                f"DenseCell has {self.U.dtype} parameters and got x of {x.dtype}; convert one, e.g. x.to({self.U.dtype})."
            )
        return (x.shape[0], self.width)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return self.activation(nn.functional.linear(z, self.recurrent()) + nn.functional.linear(x, self.U, self.b))

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.width}, activation={self.activation!r}, bias={self.b is not None}"


def _solved_in(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in LOW_PRECISION else dtype
