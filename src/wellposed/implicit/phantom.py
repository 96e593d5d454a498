"""Inexact gradients: a few tracked steps at the equilibrium."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.implicit._gradient import AbstractGradient, Context
from wellposed.implicit._transformed import solve_transformed
from wellposed.solve import AbstractMap, Outcome, check_interval, check_positive_integer

__all__ = ["JacobianFree", "PhantomGradient"]


@dataclass(frozen=True)
class PhantomGradient(AbstractGradient):
    r"""The gradient of `steps` damped steps started at the equilibrium, [geng2021].

    With J the Jacobian at the equilibrium and t the damping, a cotangent v becomes

        u = t sum_{i < steps} ((1 - t) I + t J^T)^i v

    instead of (I - J)^-T v: *inexact*, cheap, and exact in the limit if the sum converges. That is the derivative of the
    steps z <- (1 - t) z + t f(z); the value is the equilibrium that the solver found, which the steps may lead away from.

    Args:
        steps: Tracked steps; memory grows with them.
        damping: t, in (0, 1].
    """

    steps: int = 5
    damping: float = 0.5

    def __post_init__(self) -> None:
        check_positive_integer("PhantomGradient", "steps", self.steps)
        check_interval("PhantomGradient", "damping", self.damping, low=0.0, high=1.0)

    def attach(self, f: AbstractMap, outcome: Outcome, context: Context) -> Tensor:
        return self.follow(f, outcome.value.detach())

    def transformed(self, f: AbstractMap, start: Tensor, context: Context) -> Tensor:
        return self.follow(f, solve_transformed(f, start, context).value.detach())

    def follow(self, f: AbstractMap, z: Tensor) -> Tensor:
        """z with the derivative of the recorded steps from it."""
        steps = z
        for _ in range(self.steps):
            fz = f.tracked(steps)
            steps = fz if self.damping == 1.0 else torch.lerp(steps, fz, self.damping)
        return _with_derivative(z, steps)


@dataclass(frozen=True)
class JacobianFree(AbstractGradient):
    r"""(I - J)^-T replaced by the identity: one tracked step, no linear solve, [fung2022].

    *Inexact*: a descent direction under conditions on f that [fung2022] states, and cheapest of all.
    """

    def attach(self, f: AbstractMap, outcome: Outcome, context: Context) -> Tensor:
        return self.follow(f, outcome.value.detach())

    def transformed(self, f: AbstractMap, start: Tensor, context: Context) -> Tensor:
        return self.follow(f, solve_transformed(f, start, context).value.detach())

    def follow(self, f: AbstractMap, z: Tensor) -> Tensor:
        """z with the derivative of the recorded step from it."""
        return _with_derivative(z, f.tracked(z))


def _with_derivative(z: Tensor, of: Tensor) -> Tensor:
    """The value of z with the derivative of another tensor; NaN where that is not finite."""
    return z + (of - of.detach())
