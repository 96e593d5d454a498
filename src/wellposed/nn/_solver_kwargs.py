"""The options of solves that networks pass to their `EquilibriumLayer`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypedDict

from wellposed._checks import Policy
from wellposed.errors import InvalidType, did_you_mean
from wellposed.implicit import AbstractGradient
from wellposed.solve.solver import AbstractSolver


class SolverKwargs(TypedDict, total=False):
    """Options that networks pass to their `EquilibriumLayer`, which has the defaults."""

    solver: AbstractSolver | None
    gradient: AbstractGradient | None
    on_failure: Policy
    rtol: float | None
    atol: float
    max_steps: int


def check_solver_kwargs(owner: str, options: Iterable[str]) -> None:
    """Raises for an option of the network `owner` that is not one of `SolverKwargs`."""
    known = SolverKwargs.__annotations__
    for name in options:
        if name not in known:
            raise InvalidType(
                f"{owner} has no option {name!r}; those of its solves are {', '.join(known)}.{did_you_mean(name, known)}"
            )
