"""The options that networks pass on to their equilibrium layer."""

from __future__ import annotations

from typing import TypedDict

from wellposed.implicit import AbstractGradient
from wellposed.solve import AbstractSolver

__all__ = ["Solving"]


class Solving(TypedDict, total=False):
    """As in `EquilibriumLayer`, which has the defaults and refuses what it does not know."""

    solver: AbstractSolver | None
    gradient: AbstractGradient | None
    on_failure: str
    rtol: float | None
    atol: float
    max_steps: int
