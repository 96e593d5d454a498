"""Cells: the maps f(z, x) of equilibrium layers, with structure or of the user."""

from __future__ import annotations

import abc
import math
from typing import Any

import torch
from torch import Tensor, nn

from wellposed._checks import check_positive_integer
from wellposed._tree import LOW_PRECISION, check_features
from wellposed.errors import InvalidType
from wellposed.nn._activation import check_activation
from wellposed.nn.activations import AbstractActivation, ReLU
from wellposed.nn.maps.affine import DenseMap, OperatorMap
from wellposed.nn.maps.operator import MonotoneOperator, OperatorCache
from wellposed.nn.parametrizations import Monotone, Spectral
from wellposed.solve.map import AbstractMap


class AbstractCell(nn.Module, abc.ABC):
    """A cell with structure: it prepares what depends on x alone once, and hands out a map of z.

    An `EquilibriumLayer` takes any module or function of (z, x); a cell of this kind is faster: the
    parts without z are made once per solve, products in place, adjoints by formula.
    """

    #: Whether rows depend on each other: a layer then solves the batch as one sample without groups.
    couples_rows: bool = False
    overridden: bool = False  #: Whether a subclass has a `forward` that its `bind` does not know.

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.overridden = "bind" not in vars(cls) and ("forward" in vars(cls) or cls.overridden)

    @abc.abstractmethod
    def bind(self, x: Tensor) -> AbstractMap:
        """The map z -> f(z, x), with a graph to x and the parameters; at least in float32."""

    @abc.abstractmethod
    def state_shape(self, x: Tensor) -> tuple[int, ...]:
        """(batch, ...) the shape of z for an input x; raises for an input that does not fit.

        A cell whose state has another dtype than x also has a method `state_dtype(x)`.
        """

    @abc.abstractmethod
    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        """f(z, x)."""


class DenseCell(AbstractCell):
    r"""f(z, x) = s(W z + U x + b).

    Starts from W_ij ~ N(0, 0.16/m) (so |W| is about 0.8: a contraction), U_ij ~ N(0, 2/d) and b =
    0, the initialization of [ling2022] with variance 0.08.

    Args:
        in_features: d.
        width: m.
        activation: s; `ReLU()` if not given.
        weight: Keeps the recurrent matrix well-posed: `Spectral(bound=0.95)` is applied to the
            parameter W at every solve; `Monotone(margin=0.1)` makes W of parameters A and B
            instead, A_ij, B_ij ~ N(0, 1/(4m)) at the start. None uses W unchanged.
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
        activation = check_activation("DenseCell", ReLU() if activation is None else activation)
        if not isinstance(weight, (Spectral, Monotone, type(None))):
            raise InvalidType(
                f"The 'weight' parameter of DenseCell must be Spectral(...), Monotone(...) or None; got {weight!r}. "
                "For a parametrization of your own, torch.nn.utils.parametrize.register_parametrization(cell, 'W', ...)."
            )
        self.in_features, self.width, self.activation = in_features, width, activation
        self.weight = weight
        factory_kwargs: dict[str, Any] = {"device": device, "dtype": dtype}
        if isinstance(weight, Monotone):
            for name in ("A", "B"):
                start = torch.randn(width, width, generator=generator, **factory_kwargs) / math.sqrt(4 * width)
                self.register_parameter(name, nn.Parameter(start))
        else:
            self.W = nn.Parameter(torch.randn(width, width, generator=generator, **factory_kwargs) * math.sqrt(0.16 / width))
        self.U = nn.Parameter(
            torch.randn(width, in_features, generator=generator, **factory_kwargs) * math.sqrt(2 / in_features)
        )
        self.b = nn.Parameter(torch.zeros(width, **factory_kwargs)) if bias else None
        self._cache = OperatorCache()

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
            operator = MonotoneOperator(lifted(self.A), lifted(self.B), self.weight.margin, self._cache)
            return OperatorMap(operator, c, self.activation)
        return DenseMap(lifted(self.recurrent()), c, self.activation, self._cache)

    def state_shape(self, x: Tensor) -> tuple[int, ...]:
        check_features("DenseCell", x, self.in_features, self.U.dtype)
        return (x.shape[0], self.width)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return self.activation(nn.functional.linear(z, self.recurrent()) + nn.functional.linear(x, self.U, self.b))

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.width}, activation={self.activation!r}, bias={self.b is not None}"
