"""Activations with what solvers and adjoints need to know of them."""

from __future__ import annotations

import abc
from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.errors import InvalidArgument

__all__ = ["AbstractActivation", "Identity", "ReLU", "Tanh"]


class AbstractActivation(abc.ABC):
    """An elementwise, non-decreasing, 1-Lipschitz function: the proximal operator of a convex potential. Stateless."""

    @abc.abstractmethod
    def __call__(self, v: Tensor) -> Tensor:
        """The value, out of place."""

    @abc.abstractmethod
    def apply_(self, v: Tensor) -> Tensor:
        """The value, in place."""

    @abc.abstractmethod
    def slope(self, y: Tensor) -> Tensor | None:
        """The derivative where the *value* is y, in the dtype of y; None if it is 1 everywhere."""

    @abc.abstractmethod
    def prox(self, v: Tensor, step_size: float) -> Tensor:
        """The proximal operator of `step_size` times the potential; at step_size 1 the activation itself."""


@dataclass(frozen=True)
class ReLU(AbstractActivation):
    """max(v, 0): the projection onto v >= 0, whatever the step size. Its derivative at 0 is taken as 0, as in PyTorch."""

    def __call__(self, v: Tensor) -> Tensor:
        return torch.relu(v)

    def apply_(self, v: Tensor) -> Tensor:
        return v.relu_()

    def slope(self, y: Tensor) -> Tensor:
        return (y > 0).to(y.dtype)

    def prox(self, v: Tensor, step_size: float) -> Tensor:
        return torch.relu(v)


@dataclass(frozen=True)
class Tanh(AbstractActivation):
    """tanh(v). Its proximal operator has a closed form at step size 1 only."""

    def __call__(self, v: Tensor) -> Tensor:
        return torch.tanh(v)

    def apply_(self, v: Tensor) -> Tensor:
        return v.tanh_()

    def slope(self, y: Tensor) -> Tensor:
        return 1 - y * y

    def prox(self, v: Tensor, step_size: float) -> Tensor:
        if step_size != 1.0:
            raise InvalidArgument(
                f"The prox of Tanh() is known for step_size 1 only; got {step_size:g}. Use step_size=1.0, or another solver."
            )
        return torch.tanh(v)


@dataclass(frozen=True)
class Identity(AbstractActivation):
    """v itself: an affine cell, z = W z + U x + b. Its potential is 0."""

    def __call__(self, v: Tensor) -> Tensor:
        return v

    def apply_(self, v: Tensor) -> Tensor:
        return v

    def slope(self, y: Tensor) -> None:
        return None

    def prox(self, v: Tensor, step_size: float) -> Tensor:
        return v
