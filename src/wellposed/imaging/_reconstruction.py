"""What the cells that reconstruct images share: an operator, a network, a proved factor."""

from __future__ import annotations

import abc
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from wellposed._checks import check_interval
from wellposed._tree import Layout
from wellposed.errors import InvalidArgument, InvalidType
from wellposed.imaging._claims import check_hooks, is_stated
from wellposed.imaging._inputs import check_data, check_image
from wellposed.linalg.directed import up
from wellposed.nn.cell import AbstractCell
from wellposed.solve.map import FunctionMap

#: What cancels in 1 - h L, in float64, generously.
_CANCELLED = 2.0**-50


def number_of(value: Any) -> float | None:
    """A real number, or a tensor with one; None if it is neither."""
    if isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex():
        return float(value.detach())
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _can_be_proved(t: Tensor) -> bool:
    """Whether a tensor is of float32 or float64, or not of numbers, and neither it nor a square of
    its entries overflows."""
    if not (t.is_floating_point() or t.is_complex()):
        return True
    info = torch.finfo(t.dtype)
    return info.bits >= 32 and (t.numel() == 0 or float(t.detach().abs().max()) <= math.sqrt(info.max))  # NaN is not


class ReconstructionCell(AbstractCell, abc.ABC):
    """A cell z -> f(z, y) with data y; its state has the shape of an image."""

    #: What the operator must have.
    _needs: tuple[str, ...] = ("A", "A_adjoint")

    def __init__(self, operator: Any, network: nn.Module, *, norm: float | None = None) -> None:
        super().__init__()
        missing = [name for name in self._needs if not callable(getattr(operator, name, None))]
        if missing:
            raise InvalidType(
                f"The operator of {type(self).__name__} needs the methods {' and '.join(self._needs)}; {operator!r} has no "
                f"{missing[0]}."
            )
        self.operator, self.network = operator, network
        self._norm = number_of(norm)
        given = self.norm if norm is None else norm if self._norm is None else self._norm
        check_interval(type(self).__name__, "norm", given, low=0.0, closed="neither")
        _ = self.least  # is checked

    @property
    def norm(self) -> float:
        """A bound of |A|: the one that was given, or that of the operator as it is now."""
        norm = number_of(getattr(self.operator, "norm", None)) if self._norm is None else self._norm
        if norm is None:
            raise InvalidArgument(
                f"{type(self).__name__} needs a bound of |A| for its step size: this operator has none, so give norm=..."
            )
        if norm <= 0:
            check_interval(type(self).__name__, "norm", norm, low=0.0, closed="neither")  # refuses
        return norm

    @property
    def least(self) -> float:
        """A lower bound of the eigenvalues of A^T A: that of the operator as it is now, or 0."""
        found, square = getattr(self.operator, "least", 0.0), self.norm * self.norm
        least = number_of(found if is_stated(self.operator, "least") else 0.0)
        if least is None or not (0 <= least <= square or math.isnan(square)):
            raise InvalidArgument(
                f"'least', the least eigenvalue of A^T A, of the operator of {type(self).__name__} must be a number in "
                f"[0, {square:g}], since its norm is {self.norm:g}; got {found!r}."
            )
        return least

    @property
    def contraction(self) -> float:
        """An upper bound of the factor by which the cell contracts, in exact arithmetic with its
        present numbers.

        Infinite, that is nothing is proved: if the network is not bounded; if a parameter or a
        buffer is of less precision than float32, not finite, or so large that its square
        overflows; if a number computed of them is not finite; if a subclass of a network, an
        operator or a cell overrides a method, or an object replaces it, and inherits the bound
        (`lipschitz`, `norm`); if one of them has a forward hook.
        """
        numbers = itertools.chain(self.parameters(), self.buffers())
        if not (is_stated(self, "_factor") and all(_can_be_proved(t) for t in numbers)):
            return math.inf
        if self._norm is None and not is_stated(self.operator, "norm"):
            return math.inf
        with torch.no_grad():
            return up(self._factor())

    @abc.abstractmethod
    def _factor(self) -> float:
        """The factor, up to rounding of float64; NaN if a number is not finite."""

    def _forward_factor(self, step: float, weight: float = 0.0) -> float:
        """|(1 - step weight) I - step A^T A|, whatever the step is."""
        ends = [abs(1 - step * (weight + eigenvalue)) for eigenvalue in (self.least, self.norm * self.norm)]
        return math.nan if any(map(math.isnan, ends)) else max(ends) + _CANCELLED

    @abc.abstractmethod
    def _step(self, z: Tensor, back: Tensor, network: Callable[[Tensor], Tensor], numbers: dict[str, Any]) -> Tensor:
        """f(z, y), where `back` is A^T y and `numbers` has `normal`, z -> A^T A z, too."""

    def _numbers(self) -> dict[str, Any]:
        """Step sizes and weights, with their graph."""
        return {}

    def image(self, z: Tensor, y: Tensor) -> Tensor:
        """The image of a state; for most cells the state itself."""
        return z

    @property
    def reflection(self) -> float:
        """How far `image` expands at most."""
        return 1.0

    @property
    def _lipschitz(self) -> float:
        """Of the network; infinite if it is not known."""
        found = getattr(self.network, "lipschitz", math.inf) if is_stated(self.network, "lipschitz") else math.inf
        constant = number_of(found)
        if constant is None or constant < 0:
            raise InvalidArgument(
                f"'lipschitz' of the network of {type(self).__name__} must be a number of at least 0; got {found!r}."
            )
        return constant

    def _bound_network(self, y: Tensor) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
        """The network with weights made once, and what it computes of the data alone: its further
        arguments, one row per image."""
        network: Any = self.network
        check_hooks(type(self).__name__, network)
        maps = network.condition(self.operator, y) if hasattr(network, "condition") else ()
        if not hasattr(network, "apply_weights"):
            return network, maps
        weights = network.weights()
        return lambda x, *maps: network.apply_weights(x, weights, *maps), maps

    def _normal(self) -> Callable[[Tensor], Tensor]:
        """z -> A^T A z: `normal` of the operator, unless it belongs to another A that a subclass or
        the object replaced."""
        operator = self.operator
        if hasattr(operator, "normal") and is_stated(operator, "normal"):
            normal: Callable[[Tensor], Tensor] = operator.normal
            return normal
        return lambda z: operator.A_adjoint(operator.A(z))

    def initial(self, y: Tensor) -> Tensor:
        """The start of a solve: A^T y."""
        check_data(self, self.network, y)
        image: Tensor = self.operator.A_adjoint(y)
        check_image(self, self.network, image)
        return image

    def state_shape(self, x: Tensor) -> tuple[int, ...]:
        return tuple(self.initial(x).shape)

    def state_dtype(self, x: Tensor) -> torch.dtype:
        return x.real.dtype if x.is_complex() else x.dtype

    def _function(self, x: Tensor) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
        """f and what it takes after z, with the parts that do not depend on z made once."""
        numbers, back = {**self._numbers(), "normal": self._normal()}, self.initial(x)
        network, maps = self._bound_network(x)

        def f(z: Tensor, back: Tensor, *maps: Tensor) -> Tensor:
            return self._step(z, back, lambda u: network(u, *maps), numbers)

        return f, (back, *maps)

    def bind(self, x: Tensor) -> FunctionMap:
        layout = Layout.of(self.initial(x).detach(), "z0")  # refuses what does not fit
        f, arguments = self._function(x)
        return FunctionMap(f, layout, arguments)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        """f(z, y): (batch, channels, height, width) -> the same.

        Args:
            z: The state. x: The data y.
        """
        f, arguments = self._function(x)
        return f(z, *arguments)
