"""What a gradient mode is: it attaches a graph to an equilibrium that was found without one.

And an equilibrium with its adjoint, which need no graph.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor

if TYPE_CHECKING:
    from wellposed.solve._samples import Outcome
    from wellposed.solve.map import AbstractMap
    from wellposed.solve.solution import Solution, SolveOptions
    from wellposed.status import Status


class AbstractGradient(abc.ABC):
    """How a cotangent passes through z = f(z). Immutable.

    Examples:
        >>> import torch, wellposed as wp
        >>> for mode in (wp.ImplicitGradient(), wp.PhantomGradient(), wp.JacobianFree()):
        ...     x = torch.ones(1, 1, dtype=torch.float64, requires_grad=True)
        ...     layer = wp.EquilibriumLayer(lambda z, x: 0.5 * z + x, gradient=mode)
        ...     layer(x).sum().backward()
        ...     print(type(mode).__name__, round(x.grad.item(), 3))
        ImplicitGradient 2.0
        PhantomGradient 1.525
        JacobianFree 1.0
    """

    @abc.abstractmethod
    def attach(self, f: AbstractMap, outcome: Outcome, options: SolveOptions) -> Tensor:
        """(batch, features) the equilibrium with a graph to all that f depends on.

        Args:
            f: The map.
            outcome: The result of the solve.
            options: Those of the solve; a linear solve of the backward pass takes what it needs.
        """

    @abc.abstractmethod
    def transformed(self, f: AbstractMap, start: Tensor, options: SolveOptions) -> Tensor:
        """The equilibrium with its derivatives inside transforms; see `_transformed.py`."""


class AbstractUnrolled(AbstractGradient):
    """A mode that takes its own steps from the start, in the place of the solver."""

    @property
    @abc.abstractmethod
    def evaluations(self) -> int:
        """Of f, by all steps."""

    @abc.abstractmethod
    def unroll(self, f: AbstractMap, z: Tensor, options: SolveOptions) -> Tensor:
        """(batch, features) the state after the steps from z, with the graph of its gradient."""

    @abc.abstractmethod
    def advice(self, status: Status, rate: float) -> str:
        """What to try when a sample ended with `status`."""

    def attach(self, f: AbstractMap, outcome: Outcome, options: SolveOptions) -> NoReturn:
        raise NotImplementedError(f"{type(self).__name__} computes its own value from the start, by unroll().")


@dataclass(frozen=True)
class Linearised:
    """An equilibrium with its adjoint.

    Attributes:
        f: The map (an `AbstractStructuredMap`), without a graph.
        value: (batch, features) z.
        image: (batch, features) f(z).
        adjoint: (batch, features) the solution of its adjoint system (for `DenseMap` masked).
        solution, adjoint_solution: Of the two solves.
    """

    f: Any
    value: Tensor
    image: Tensor
    adjoint: Tensor
    solution: Solution
    adjoint_solution: Solution
