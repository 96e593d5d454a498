"""What a gradient mode is: it hangs a graph on an equilibrium that was found without one."""

from __future__ import annotations

import abc
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from wellposed.solve import AbstractMap, Outcome, Solution, Tolerance
from wellposed.solve._whole_batch import WholeBatch

__all__ = ["AbstractGradient", "Context"]


@dataclass(frozen=True)
class Context:
    """What a backward pass needs to know of the forward one.

    Attributes:
        tolerance: That of the forward solve.
        max_steps: That of the forward solve.
        on_failure: The policy.
        report: Called with the `Solution` of each linear solve, failed or not; with None if a transform hides it.
        found_coupled: Called with a `Solution` whose rows were found to depend on each other.
        counts: How often solves failed, by cause.
    """

    tolerance: Tolerance
    max_steps: int
    on_failure: str
    report: Callable[[Solution | None], None]
    found_coupled: Callable[[Solution], None]
    counts: Counter[str]


class AbstractGradient(abc.ABC):
    """How a cotangent passes through z = f(z). Immutable."""

    def run(
        self, f: AbstractMap, start: Tensor, solve: Callable[[Tensor], Outcome], context: Context
    ) -> tuple[Tensor, Outcome]:
        """Finds the equilibrium without a graph, then attaches one.

        Args:
            f: The map.
            start: (batch, features).
            solve: The solver, from a start to an outcome.
            context: For the backward pass.
        """
        outcome = solve(start)
        if outcome.coupled:
            whole = self.attach(WholeBatch(f, start.shape), outcome.as_one(), context)
            return whole.reshape(start.shape), outcome
        return self.attach(f, outcome, context), outcome

    @abc.abstractmethod
    def transformed(self, f: AbstractMap, start: Tensor, context: Context) -> Tensor:
        """The equilibrium with its derivatives inside `torch.func` transforms; see `_transformed.py`."""

    @abc.abstractmethod
    def attach(self, f: AbstractMap, outcome: Outcome, context: Context) -> Tensor:
        """(batch, features) the equilibrium with a graph that reaches whatever f depends on."""
