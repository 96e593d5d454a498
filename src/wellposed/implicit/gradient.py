"""What a gradient mode is: it attaches a graph to an equilibrium that was found without one."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from wellposed.solve._samples import Outcome
    from wellposed.solve.map import AbstractMap
    from wellposed.solve.solution import SolveOptions


class AbstractGradient(abc.ABC):
    """How a cotangent passes through z = f(z). Immutable."""

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
