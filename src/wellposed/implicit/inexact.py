"""Gradients by recorded steps: a few at the equilibrium (inexact), or all from the start."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed._checks import check_interval, check_positive_integer
from wellposed._torch import apart
from wellposed.errors import InvalidArgument
from wellposed.implicit._transformed import solve_transformed
from wellposed.implicit.gradient import AbstractGradient, AbstractUnrolled
from wellposed.solve._samples import Outcome
from wellposed.solve.map import AbstractMap
from wellposed.solve.solution import SolveOptions
from wellposed.status import Status, advice


class _Tail(AbstractGradient):
    """The equilibrium with the derivative of recorded steps from it."""

    steps: int
    damping: float

    def attach(self, f: AbstractMap, outcome: Outcome, options: SolveOptions) -> Tensor:
        return self._with_derivative(f, outcome.value.detach())

    def transformed(self, f: AbstractMap, start: Tensor, options: SolveOptions) -> Tensor:
        return self._with_derivative(f, solve_transformed(f, start, options).value.detach())

    def _with_derivative(self, f: AbstractMap, z: Tensor) -> Tensor:
        """z with the derivative of the steps; NaN where those are not finite."""
        steps = self._follow(f, z)
        return z + (steps - steps.detach())

    def _follow(self, f: AbstractMap, z: Tensor) -> Tensor:
        """The recorded steps from z."""
        for _ in range(self.steps):
            fz = f.tracked(z)
            z = fz if self.damping == 1.0 else torch.lerp(z, fz, self.damping)
        return z


@dataclass(frozen=True)
class PhantomGradient(_Tail):
    r"""The gradient of `steps` damped steps started at the equilibrium, [geng2021].

    With J the Jacobian at the equilibrium and t the damping, a cotangent v becomes

        u = t sum_{i < steps} ((1 - t) I + t J^T)^i v

    instead of (I - J)^-T v: *inexact*, cheap, and exact in the limit if the sum converges. That is
    the derivative of the steps z <- (1 - t) z + t f(z); the value is the equilibrium that the
    solver found, which the steps may lead away from.

    Args:
        steps: Tracked steps; memory grows with them.
        damping: t, in (0, 1].

    Examples:
        >>> import torch, wellposed as wp
        >>> layer = wp.EquilibriumLayer(lambda z, x: 0.5 * z + x, gradient=wp.PhantomGradient(steps=5, damping=0.5))
        >>> x = torch.ones(1, 1, dtype=torch.float64, requires_grad=True)
        >>> layer(x).sum().backward()
        >>> round(x.grad.item(), 3)  # the exact derivative is 2
        1.525
    """

    steps: int = 5
    damping: float = 0.5

    def __post_init__(self) -> None:
        check_positive_integer("PhantomGradient", "steps", self.steps)
        check_interval("PhantomGradient", "damping", self.damping, low=0.0, high=1.0)


@dataclass(frozen=True)
class JacobianFree(_Tail):
    r"""(I - J)^-T replaced by the identity: one tracked step, no linear solve, [fung2022].

    *Inexact*: a descent direction under conditions on f that [fung2022] states, and cheapest of
    all.

    Examples:
        >>> import torch, wellposed as wp
        >>> layer = wp.EquilibriumLayer(lambda z, x: 0.5 * z + x, gradient=wp.JacobianFree())
        >>> x = torch.ones(1, 1, dtype=torch.float64, requires_grad=True)
        >>> layer(x).sum().backward()
        >>> x.grad.item()  # the exact derivative is 2
        1.0
    """

    def _follow(self, f: AbstractMap, z: Tensor) -> Tensor:
        return f.tracked(z)


@dataclass(frozen=True)
class UnrolledGradient(AbstractUnrolled):
    """Takes `steps` plain steps z <- f(z) from the start, and differentiates through all of them.

    The solver of the layer is not used: the value is that of the unrolled network, and its residual
    is measured (one more evaluation, without a graph), so that the status shows a depth too small
    for the tolerance. Memory grows with the steps that are recorded.

    Args:
        steps: Depth.
        recorded: How many of the last steps are recorded; None for all. Fewer are cheaper, in time
            and memory, and *inexact*: the state before them is held fixed.

    Examples:
        >>> import torch, wellposed as wp
        >>> layer = wp.EquilibriumLayer(lambda z, x: 0.5 * z + x, gradient=wp.UnrolledGradient(steps=30), rtol=1e-6)
        >>> x = torch.ones(1, 1, dtype=torch.float64, requires_grad=True)
        >>> layer(x).sum().backward()
        >>> round(x.grad.item(), 6)
        2.0
    """

    steps: int
    recorded: int | None = None

    def __post_init__(self) -> None:
        check_positive_integer("UnrolledGradient", "steps", self.steps)
        if self.recorded is not None:
            check_positive_integer("UnrolledGradient", "recorded", self.recorded)
            if self.recorded > self.steps:
                raise InvalidArgument(
                    f"The 'recorded' parameter of UnrolledGradient must be at most steps={self.steps}. Got {self.recorded} "
                    "instead."
                )

    @property
    def evaluations(self) -> int:
        return self.steps

    def unroll(self, f: AbstractMap, z: Tensor, options: SolveOptions) -> Tensor:
        recorded = self.steps if self.recorded is None else self.recorded
        if recorded < self.steps:
            with torch.no_grad(), apart():
                for _ in range(self.steps - recorded):
                    z = f.tracked(z)
            z = z.detach()
        for _ in range(recorded):
            z = f.tracked(z)
        return z

    def transformed(self, f: AbstractMap, start: Tensor, options: SolveOptions) -> Tensor:
        return self.unroll(f, start, options)

    def advice(self, status: Status, rate: float) -> str:
        if status is Status.MAX_STEPS:
            return "UnrolledGradient(steps=...) sets its depth: raise it, loosen rtol, or use ImplicitGradient()."
        return advice(status, rate)
