"""The options that networks pass on to their equilibrium layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypedDict

from wellposed.errors import InvalidType, did_you_mean
from wellposed.implicit import AbstractGradient
from wellposed.solve import AbstractSolver

__all__ = ["Solving", "check_solving"]


class Solving(TypedDict, total=False):
    """As in `EquilibriumLayer`, which has the defaults and refuses what it does not know."""

    solver: AbstractSolver | None
    gradient: AbstractGradient | None
    on_failure: str
    rtol: float | None
    atol: float
    max_steps: int


def check_solving(owner: str, options: Iterable[str]) -> None:
    """Raises for an option that is none of `Solving`, in the name of the network that was given it."""
    known = Solving.__annotations__
    for name in options:
        if name not in known:
            raise InvalidType(
                f"{owner} has no option {name!r}; those of its solves are {', '.join(known)}.{did_you_mean(name, known)}"
            )
