"""What an activation is: the proximal operator of a convex potential."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wellposed.errors import InvalidArgument, InvalidType

_MOST_STEPS = 200


class AbstractActivation(abc.ABC):
    """A non-decreasing 1-Lipschitz function: the proximal operator of a convex potential.

    Stateless and elementwise. The abstract methods are enough for every solver and gradient;
    `potential`, `primitive` and `conjugate` serve equilibria as minimisers, `slope_bounds` bounds
    of their sensitivity.

    Examples:
        >>> import torch, wellposed as wp
        >>> class Half(wp.nn.AbstractActivation):
        ...     def __call__(self, v):
        ...         return v / 2
        ...     def slope(self, y):
        ...         return torch.full_like(y, 0.5)
        ...     def prox(self, v, step_size):
        ...         return v / (1 + step_size)
        >>> wp.EquilibriumLayer(wp.nn.DenseCell(4, 16, Half())).solve(torch.ones(2, 4)).status
        StatusArray(CONVERGED: 2)
    """

    @abc.abstractmethod
    def __call__(self, v: Tensor) -> Tensor:
        """The value, out of place."""

    def apply_(self, v: Tensor) -> Tensor:
        """The value, in place."""
        return v.copy_(self(v))

    @abc.abstractmethod
    def slope(self, y: Tensor) -> Tensor | None:
        """The derivative where the *value* is y, in the dtype of y; None if it is 1 everywhere."""

    @abc.abstractmethod
    def prox(self, v: Tensor, step_size: float | Tensor) -> Tensor:
        """The proximal operator of `step_size` times the potential; for 1 the activation.

        Args:
            v: Any shape.
            step_size: Positive; a tensor must broadcast with v.
        """

    def reflect(self, v: Tensor, step_size: float) -> Tensor:
        """2 prox(v) - v, a new tensor."""
        return torch.lerp(v, self.prox(v, step_size), 2.0)

    @property
    def slope_bounds(self) -> tuple[float, float]:
        """(least, largest) derivative, or the interval's ends if they are only approached."""
        return 0.0, 1.0

    @property
    def lipschitz(self) -> float:
        """The Lipschitz constant: the largest slope."""
        return self.slope_bounds[1]

    def derivative(self, v: Tensor) -> Tensor:
        """s'(v), elementwise."""
        slope = self.slope(self(v))
        return torch.ones_like(v) if slope is None else slope

    def potential(self, y: Tensor) -> Tensor:
        """p(y), infinite outside the domain: s(v) minimises p(y) + (y - v)^2/2 over y."""
        raise self._unknown("potential")

    def primitive(self, v: Tensor) -> Tensor:
        """The integral of s from 0 to v, elementwise: convex, with gradient s."""
        raise self._unknown("primitive")

    def conjugate(self, w: Tensor) -> Tensor:
        """sup over y of w y - p(y), elementwise: the Fenchel conjugate of the potential."""
        raise self._unknown("conjugate")

    def _unknown(self, what: str) -> InvalidArgument:
        return InvalidArgument(
            f"{type(self).__name__} has no {what}. Implement {what}() in it, or use an activation of wellposed.nn."
        )


class SmoothActivation(AbstractActivation):
    """An activation with a positive derivative everywhere: its prox solves a scalar equation."""

    def prox(self, v: Tensor, step_size: float | Tensor) -> Tensor:
        if isinstance(step_size, (int, float)) and step_size == 1.0:
            return self(v)
        a = torch.as_tensor(step_size, dtype=v.dtype, device=v.device)

        def g(w: Tensor) -> tuple[Tensor, Tensor]:  # (1 - a) s(w) + a w - v, with slopes between min(a, 1) and max(a, 1)
            y = self(w)
            slope = self.slope(y)
            assert slope is not None
            return y + a * self._gap(w, y) - v, (1 - a) * slope + a

        y = self(v)
        rounding = 4 * torch.finfo(v.dtype).eps * (v.abs() + y.abs())  # or the root may lie outside by the rounding of the gap
        radius = (1 - a).abs() * (self._gap(v, y).abs() + rounding) / a.clamp(max=1.0)
        return self(increasing_root(g, v - radius, v + radius))

    def _gap(self, w: Tensor, y: Tensor) -> Tensor:
        """w - s(w), with y = s(w)."""
        return w - y

    def conjugate(self, w: Tensor) -> Tensor:
        """p*(w) = w y - p(y) at the y = s(v) with p'(y) = v - s(v) = w."""

        def g(v: Tensor) -> tuple[Tensor, Tensor]:
            y = self(v)
            slope = self.slope(y)
            assert slope is not None
            return v - y - w, 1 - slope

        y = self(increasing_root(g, w - 1, w + 1))  # |s| <= 1
        return w * y - self.potential(y)


def increasing_root(g: Callable[[Tensor], tuple[Tensor, Tensor]], low: Tensor, high: Tensor) -> Tensor:
    """The w in [low, high] with g(w) = 0, elementwise, by Newton steps in a shrinking bracket.

    Args:
        g: w -> (value, derivative) of a non-decreasing function with g(low) <= 0 <= g(high).
        low, high: The bracket, of the same shape.
    """
    w = (low + high) / 2
    settled = ~w.isfinite()  # once a step is below rounding an element stays settled
    for _ in range(_MOST_STEPS):
        value, derivative = g(w)
        low, high = torch.where(value < 0, w, low), torch.where(value > 0, w, high)
        newton = w - value / derivative
        inside = (newton >= low) & (newton <= high)
        following = torch.where(inside, newton, (low + high) / 2)
        following = torch.where(value == 0, w, following)
        settled |= (following - w).abs() <= 4 * torch.finfo(w.dtype).eps * (1 + w.abs())
        w = following
        if bool(settled.all()):
            break
    return w


def check_activation(owner: str, activation: Any) -> AbstractActivation:
    """The activation that `owner` was given."""
    if not isinstance(activation, AbstractActivation):
        kind = f"{type(activation).__module__}.{activation!r}"
        raise InvalidType(
            f"The 'activation' parameter of {owner} must be one of wellposed.nn, such as wp.nn.ReLU(); got {kind}."
        )
    return activation
