"""The stages that an OptEq map is composed of, and the most important of them: the unit layer."""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.convex.operators import AbstractOperator
from wellposed.nn import AbstractActivation

__all__ = ["AbstractStage", "Tangent", "Unit"]


@dataclass(frozen=True)
class Tangent:
    """A stage at a point: its value, and products with its Jacobian and with the transpose."""

    value: Tensor
    mv: Callable[[Tensor], Tensor]
    rmv: Callable[[Tensor], Tensor]


class AbstractStage(abc.ABC):
    """One factor of T = stage_L o ... o stage_1, for a batch of states (n, ...)."""

    @abc.abstractmethod
    def __call__(self, z: Tensor) -> Tensor:
        """The value, out of place, as autograd should see it."""

    @abc.abstractmethod
    def linearize(self, z: Tensor) -> Tangent:
        """Value and Jacobian at z, without a graph."""

    def take(self, rows: Tensor) -> AbstractStage:
        """The same for some of the samples."""
        return self

    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors that the stage depends on."""
        return ()

    def with_inputs(self, *inputs: Tensor) -> AbstractStage:
        """The same with other tensors in their place."""
        return self

    def pull(self, q: Tensor, z: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """What a cotangent q of the value at z means for z, and for each of `inputs`; without a graph."""
        return self.linearize(z).rmv(q), ()


class Unit(AbstractStage):
    r"""f(z) = a/mu W^T s(W z + c) + (1 - a) z, the unit layer of [xie2021, eq. (5)].

    By [xie2021, Theorem 1] f = prox of a convex function if |W|^2 L_s <= mu. With D = diag(s'(W z + c)) its Jacobian
    a/mu W^T D W + (1 - a) I is symmetric and lies between (1 - a) I and (a |W|^2 L_s/mu + 1 - a) I.

    Args:
        operator: W.
        c: (n, ...) = U x + b.
        activation: s.
        scale: a / mu.
        keep: 1 - a.
    """

    def __init__(
        self, operator: AbstractOperator, c: Tensor, activation: AbstractActivation, *, scale: float = 1.0, keep: float = 0.0
    ) -> None:
        self.operator, self.c, self.activation, self.scale, self.keep = operator, c, activation, scale, keep

    def hidden(self, z: Tensor) -> Tensor:
        """(n, ...) s(W z + c)."""
        return self.activation(self.operator.apply(z) + self.c)

    def __call__(self, z: Tensor) -> Tensor:
        product = self.operator.transpose(self.hidden(z))
        if self.scale != 1.0:
            product = self.scale * product
        return product if self.keep == 0.0 else torch.add(product, z, alpha=self.keep)

    def in_place(self, z: Tensor) -> Tensor:
        """The value without a graph and with fewer temporaries."""
        v = self.activation.apply_(self.operator.apply(z).add_(self.c))
        product = self.operator.transpose(v)
        if self.scale != 1.0:
            product.mul_(self.scale)
        return product if self.keep == 0.0 else product.add_(z, alpha=self.keep)

    def linearize(self, z: Tensor) -> Tangent:
        hidden = self.hidden(z)
        slope = self.activation.slope(hidden)

        def product(u: Tensor) -> Tensor:
            v = self.operator.apply(u)
            image = self.operator.transpose(v if slope is None else v.mul_(slope)).mul_(self.scale)
            return image if self.keep == 0.0 else image.add_(u, alpha=self.keep)

        value = self.operator.transpose(hidden).mul_(self.scale)
        # the Jacobian is symmetric
        return Tangent(value if self.keep == 0.0 else value.add_(z, alpha=self.keep), product, product)

    def take(self, rows: Tensor) -> Unit:
        return Unit(self.operator, self.c[rows], self.activation, scale=self.scale, keep=self.keep)

    def inputs(self) -> tuple[Tensor, ...]:
        return self.operator.tensor, self.c

    def with_inputs(self, *inputs: Tensor) -> Unit:
        tensor, c = inputs
        return Unit(self.operator.with_tensor(tensor), c, self.activation, scale=self.scale, keep=self.keep)

    def without_skip(self) -> Unit:
        """W^T s(W z + c)/mu: the same with a = 1."""
        return Unit(self.operator, self.c, self.activation, scale=self.scale / (1 - self.keep))

    def detach(self) -> Unit:
        """The same without a graph."""
        return self.with_inputs(self.operator.tensor.detach(), self.c.detach())

    def sensitivity(self, q: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        """(s, h) with s = a/mu s(W z + c) and h = a/mu D W q: <q, f(z)> has the gradients s q^T + h z^T in W and h in c."""
        s = self.activation.apply_(self.operator.apply(z).add_(self.c))
        h = self.operator.apply(q)
        slope = self.activation.slope(s)
        if slope is not None:
            h.mul_(slope)
        # in place: in a convolutional network these are by far the largest tensors of a backward pass
        return s.mul_(self.scale), h.mul_(self.scale)

    def pull(self, q: Tensor, z: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        s, h = self.sensitivity(q, z)
        in_W = self.operator.cotangent(s, q).add_(self.operator.cotangent(h, z))
        before = self.operator.transpose(h)
        return before if self.keep == 0.0 else before.add_(q, alpha=self.keep), (in_W, h)
