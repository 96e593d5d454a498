r"""Equilibria that reconstruct an image x from y = A x + noise [gilton2021].

The cells iterate a method of optimization in which a network N takes the place of the regulariser.
With |N| <= k < 1 (see `BoundedDnCNN`), m <= A^T A <= L and the step sizes below, each is a
contraction with a factor that is known, whatever the data; so an equilibrium exists, is unique, and
`Solution.error_bound(cell.contraction)` bounds the distance of the image from it.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from wellposed._checks import check_interval
from wellposed._tree import Layout
from wellposed.errors import InvalidArgument, InvalidType
from wellposed.nn.cell import AbstractCell
from wellposed.nn.layer import EquilibriumLayer
from wellposed.solve.map import FunctionMap


class _Reconstruction(AbstractCell, abc.ABC):
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
        norm = getattr(operator, "norm", None) if norm is None else norm
        if not isinstance(norm, (int, float)):
            raise InvalidArgument(
                f"{type(self).__name__} needs a bound of |A| for its step size: this operator has none, so give norm=..."
            )
        check_interval(type(self).__name__, "norm", norm, low=0.0, closed="neither")
        self.operator, self.network = operator, network
        self.norm, self.least = float(norm), float(getattr(operator, "least", 0.0))

    @property
    @abc.abstractmethod
    def contraction(self) -> float:
        """An upper bound of the factor by which the cell contracts; infinite if the network is
        not bounded."""

    @abc.abstractmethod
    def _step(self, z: Tensor, back: Tensor, network: Callable[[Tensor], Tensor], numbers: dict[str, Any]) -> Tensor:
        """f(z, y), where `back` is A^T y."""

    def _numbers(self) -> dict[str, Any]:
        """Step sizes and weights, with their graph."""
        return {}

    def image(self, z: Tensor, y: Tensor) -> Tensor:
        """The image of a state; for most cells the state itself."""
        return z

    @property
    def _lipschitz(self) -> float:
        """Of the network; infinite if it is not known."""
        return float(getattr(self.network, "lipschitz", math.inf))

    def _bound_network(self, y: Tensor) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
        """The network with weights made once, and what it computes of the data alone: its further
        arguments, one row per image."""
        network: Any = self.network
        maps = network.condition(self.operator, y) if hasattr(network, "condition") else ()
        if not hasattr(network, "apply_weights"):
            return network, maps
        weights = network.weights()
        return lambda x, *maps: network.apply_weights(x, weights, *maps), maps

    def _normal(self, z: Tensor) -> Tensor:
        """A^T A z."""
        if hasattr(self.operator, "normal"):
            return self.operator.normal(z)
        return self.operator.A_adjoint(self.operator.A(z))

    def initial(self, y: Tensor) -> Tensor:
        """The start of a solve: A^T y."""
        return self.operator.A_adjoint(y)

    def state_shape(self, x: Tensor) -> tuple[int, ...]:
        return tuple(self.initial(x).shape)

    def state_dtype(self, x: Tensor) -> torch.dtype:
        return x.real.dtype if x.is_complex() else x.dtype

    def _function(self, x: Tensor) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
        """f and what it takes after z, with the parts that do not depend on z made once."""
        numbers, back = self._numbers(), self.operator.A_adjoint(x)
        network, maps = self._bound_network(x)

        def f(z: Tensor, back: Tensor, *maps: Tensor) -> Tensor:
            return self._step(z, back, lambda u: network(u, *maps), numbers)

        return f, (back, *maps)

    def bind(self, x: Tensor) -> FunctionMap:
        f, arguments = self._function(x)
        return FunctionMap(f, Layout.of(self.initial(x).detach(), "z0"), arguments)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        """f(z, y): (batch, channels, height, width) -> the same.

        Args:
            z: The state. x: The data y.
        """
        f, arguments = self._function(x)
        return f(z, *arguments)


class DEQGrad(_Reconstruction):
    r"""f(x, y) = x - h (A^T (A x - y) + w (x - N(x))), with h = 1/(L + w).

    w > 0 is learned. The factor is 1 - h (m + w (1 - k)).

    Args:
        operator: With `A` and `A_adjoint`.
        network: N.
        weight: w at the start.
        norm: A bound of |A|, whose square is L; that of the operator if not given.

    Examples:
        >>> import torch, wellposed as wp
        >>> blur = wp.imaging.Blur(wp.imaging.gaussian_kernel(1.0))
        >>> cell = wp.imaging.DEQGrad(blur, wp.imaging.BoundedDnCNN(features=4, depth=2, bound=0.9))
        >>> cell.contraction < 1
        True
    """

    def __init__(self, operator: Any, network: nn.Module, *, weight: float = 0.1, norm: float | None = None) -> None:
        super().__init__(operator, network, norm=norm)
        check_interval("DEQGrad", "weight", weight, low=0.0, closed="neither")
        self.log_weight = nn.Parameter(torch.tensor(math.log(weight)))

    def _numbers(self) -> dict[str, Any]:
        weight = self.log_weight.exp()
        return {"weight": weight, "step": 1 / (self.norm**2 + weight)}

    def _step(self, z: Tensor, back: Tensor, network: Callable[[Tensor], Tensor], numbers: dict[str, Any]) -> Tensor:
        slope = self._normal(z) - back + numbers["weight"] * (z - network(z))
        return z - numbers["step"] * slope

    @property
    def contraction(self) -> float:
        weight = math.exp(float(self.log_weight.detach()))
        gap = (self.least + weight * (1 - self._lipschitz)) / (self.norm**2 + weight)
        return (1 - gap) * (1 + 1e-6)


class DEQProx(_Reconstruction):
    r"""f(x, y) = N(x - h A^T (A x - y)), with h = t/L and 0 < t <= 1.

    t is learned. The factor is k (1 - h m).

    Args:
        operator, network, norm: As in `DEQGrad`.
        step: t at the start, in (0, 1).

    Examples:
        >>> import torch, wellposed as wp
        >>> mask = torch.rand(8, 8, generator=torch.Generator().manual_seed(0)) < 0.7
        >>> cell = wp.imaging.DEQProx(wp.imaging.Inpainting(mask), wp.imaging.BoundedDnCNN(features=4, bound=0.9))
        >>> wp.imaging.Reconstructor(cell, rtol=1e-3)(torch.rand(2, 1, 8, 8) * mask).shape
        torch.Size([2, 1, 8, 8])
    """

    def __init__(self, operator: Any, network: nn.Module, *, step: float = 0.9, norm: float | None = None) -> None:
        super().__init__(operator, network, norm=norm)
        check_interval("DEQProx", "step", step, low=0.0, high=1.0, closed="neither")
        self.logit_step = nn.Parameter(torch.tensor(math.log(step / (1 - step))))

    def _numbers(self) -> dict[str, Any]:
        return {"step": torch.sigmoid(self.logit_step) / self.norm**2}

    def _step(self, z: Tensor, back: Tensor, network: Callable[[Tensor], Tensor], numbers: dict[str, Any]) -> Tensor:
        return network(z - numbers["step"] * (self._normal(z) - back))

    @property
    def contraction(self) -> float:
        step = float(torch.sigmoid(self.logit_step.detach().double())) / self.norm**2
        return self._lipschitz * (1 - step * self.least) * (1 + 1e-6)


class DEQADMM(_Reconstruction):
    r"""The method of multipliers as a map of one image u (Douglas-Rachford):

        x = prox(u),    f(u, y) = (u + N(2 x - u))/2,    prox(u) = (I + g A^T A)^-1 (u + g A^T y)

    where (N + I)/2 takes the place of the proximal operator of the regulariser. u -> 2 prox(u) - u
    does not expand, so the factor is (1 + k)/2. The image of a state u is prox(u); g > 0 is
    learned.

    Args:
        operator: With `A`, `A_adjoint` and `prox_l2(z, y, gamma)`.
        network, norm: As in `DEQGrad`.
        penalty: g at the start.

    Examples:
        >>> import torch, wellposed as wp
        >>> blur = wp.imaging.Blur(wp.imaging.gaussian_kernel(1.0))
        >>> cell = wp.imaging.DEQADMM(blur, wp.imaging.BoundedDnCNN(features=4, bound=0.9), penalty=5.0)
        >>> wp.imaging.Reconstructor(cell, rtol=1e-3)(torch.rand(2, 1, 8, 8)).shape
        torch.Size([2, 1, 8, 8])
    """

    _needs = ("A", "A_adjoint", "prox_l2")

    def __init__(self, operator: Any, network: nn.Module, *, penalty: float = 10.0, norm: float | None = None) -> None:
        super().__init__(operator, network, norm=norm)
        check_interval("DEQADMM", "penalty", penalty, low=0.0, closed="neither")
        self.log_penalty = nn.Parameter(torch.tensor(math.log(penalty)))

    def image(self, z: Tensor, y: Tensor) -> Tensor:
        return self.operator.prox_l2(z, y, self.log_penalty.exp())

    def _function(self, x: Tensor) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
        penalty = self.log_penalty.exp()
        network, maps = self._bound_network(x)

        def f(z: Tensor, y: Tensor, *maps: Tensor) -> Tensor:
            return (z + network(2 * self.operator.prox_l2(z, y, penalty) - z, *maps)) / 2

        return f, (x, *maps)

    def _step(self, z: Tensor, back: Tensor, network: Callable[[Tensor], Tensor], numbers: dict[str, Any]) -> Tensor:
        raise NotImplementedError  # its step needs the data, not A^T y

    @property
    def contraction(self) -> float:
        return (1 + self._lipschitz) / 2 * (1 + 1e-6)


class Reconstructor(nn.Module):
    """Images from data: the equilibrium of a cell, as an image.

    Args:
        cell: `DEQGrad`, `DEQProx` or `DEQADMM`.
        options: Of `EquilibriumLayer`.

    Attributes:
        layer: The `EquilibriumLayer`; `layer.last_solution` has the status of every image.

    Examples:
        >>> import torch, wellposed as wp
        >>> blur = wp.imaging.Blur(wp.imaging.gaussian_kernel(1.0))
        >>> cell = wp.imaging.DEQGrad(blur, wp.imaging.BoundedDnCNN(features=4, bound=0.9))
        >>> model = wp.imaging.Reconstructor(cell, rtol=1e-3)
        >>> model(blur.A(torch.rand(2, 1, 8, 8))).shape, model.layer.last_solution.status
        (torch.Size([2, 1, 8, 8]), StatusArray(CONVERGED: 2))
    """

    def __init__(self, cell: AbstractCell, **options: Any) -> None:
        super().__init__()
        if not isinstance(cell, _Reconstruction):
            raise InvalidType(f"Reconstructor expects DEQGrad, DEQProx or DEQADMM; got {type(cell).__name__}.")
        self.layer = EquilibriumLayer(cell, **options)

    def forward(self, y: Tensor) -> Tensor:
        """Data -> (batch, channels, height, width)."""
        cell = self.layer.cell
        assert isinstance(cell, _Reconstruction)
        return cell.image(self.layer(y, z0=cell.initial(y).detach()), y)
