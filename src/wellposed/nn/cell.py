"""Cells: the maps f(z, x) of equilibrium layers, with structure or of the user."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from wellposed._checks import check_positive_integer
from wellposed._torch import BatchNorm
from wellposed._tree import LOW_PRECISION, Layout, check_features, map_tensors
from wellposed.errors import InvalidArgument, InvalidType
from wellposed.nn._activation import check_activation
from wellposed.nn._start import with_shape_hint
from wellposed.nn.activations import AbstractActivation, ReLU
from wellposed.nn.maps.affine import DenseMap, OperatorMap
from wellposed.nn.maps.operator import MonotoneOperator, OperatorCache
from wellposed.nn.parametrizations import Monotone, Spectral
from wellposed.solve.map import AbstractMap, FunctionMap


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


def bind_function(
    cell: Callable[..., Any],
    x: Any,
    state: Any,
    layout: Layout,
    *,
    given: bool,
    state_shape: tuple[int, ...] | None,
    mixed: bool,
    coupled: bool,
    costs: dict[Any, float],
) -> FunctionMap:
    """The map z -> cell(z, x) of a module or function; a module gets low precision in float32.

    Args:
        cell: `cell(z, x)`. x: Its input.
        state, layout: A start, and its layout. costs: As for `FunctionMap`.
        given: Whether the caller gave the start. state_shape: Of the layer.
        mixed: Whether autocast is active. coupled: Whether rows may depend on each other.
    """
    function = cell
    if isinstance(cell, nn.Module) and not isinstance(cell, torch.jit.ScriptModule):
        check_norms(cell, coupled=coupled)
        function, x = _BoundModule(cell), map_tensors(_lifted, x)
    if layout.dtype not in LOW_PRECISION:
        function = with_shape_hint(function, state, given=given, state_shape=state_shape)
    return FunctionMap(function, layout, (x,), low_precision=mixed, costs=costs)


class _BoundModule:
    """A module with its present parameters and buffers, in float32 if they are of low precision.

    Backward evaluates the cell again, when others may be in their place:
    `torch.func.functional_call` restores the module's own ones at the end of the forward pass.
    """

    def __init__(self, cell: nn.Module) -> None:
        self._cell = cell
        self._places = [
            (place, name, f"{prefix}.{name}" if prefix else name, tensor)
            for prefix, module in cell.named_modules()
            for place in (module._parameters, module._buffers)
            for name, tensor in place.items()
        ]
        self._unchanged = all(tensor is None or tensor.dtype not in LOW_PRECISION for *_, tensor in self._places)
        self._tensors = {} if self._unchanged else self._by_name()

    def _by_name(self) -> dict[str, Tensor]:
        once = {id(tensor): (path, tensor) for _, _, path, tensor in reversed(self._places) if tensor is not None}
        return {path: _lifted(tensor) for path, tensor in once.values()}  # tied ones under one name

    def __call__(self, z: Any, x: Any) -> Any:
        if self._unchanged:
            for place, name, _, tensor in self._places:  # at every evaluation: twice as fast as `all` of a generator
                if place.get(name) is not tensor:
                    break
            else:
                return self._cell(z, x)
        self._tensors = self._tensors or self._by_name()
        return torch.func.functional_call(self._cell, self._tensors, (z, x))


def _lifted(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in LOW_PRECISION else tensor


def check_norms(cell: nn.Module, *, coupled: bool) -> None:
    for name, module in cell.named_modules():
        if not isinstance(module, BatchNorm):
            continue
        if module.training and module.track_running_stats:
            raise InvalidArgument(
                f"The cell holds {type(module).__name__} ({name!r}), whose running statistics change with every evaluation. "
                "Use GroupNorm or LayerNorm inside a cell (BatchNorm before and after the layer is fine), call eval() on it, "
                "or give it track_running_stats=False and the layer coupled=True."
            )
        if not coupled and (module.training or not module.track_running_stats):
            raise InvalidArgument(
                f"The cell holds {type(module).__name__} ({name!r}), which mixes the samples of a batch. Give the layer "
                "coupled=True, which solves the batch as one sample, or use GroupNorm or LayerNorm inside a cell."
            )
