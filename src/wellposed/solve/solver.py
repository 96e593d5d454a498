"""What a solver is: it takes an evaluated point to the next evaluated point, and nothing else.

Tolerances, budgets, statuses, best-so-far values and samples that leave belong to the loop (`_iterate.py`).
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from wellposed.errors import InvalidArgument
from wellposed.solve._map import AbstractMap

__all__ = ["AbstractSolver", "Point", "Step"]


@dataclass
class Point:
    """An evaluated point of every active sample.

    Attributes:
        z: (batch, features) the point.
        fz: (batch, features) f at it.
        g: (batch, features) fz - z. The loop reuses this memory: copy it to keep it.
        r: (batch,) |g|.
        target: (batch,) the |g| at which a sample is done.
        evaluations: (batch,) evaluations each sample has taken part in.
        max_steps: How many it may take part in; every sample here has at least one left.
        spare: A buffer of the shape of z that may be overwritten, or None.
        skip: Steps to take, for a solver that `skips`, before the one that is returned.
    """

    z: Tensor
    fz: Tensor
    g: Tensor
    r: Tensor
    target: Tensor
    evaluations: Tensor
    max_steps: int
    spare: Tensor | None = None
    skip: int = 0

    @property
    def budget(self) -> Tensor:
        """(batch,) evaluations each sample may still use."""
        return self.max_steps - self.evaluations


@dataclass
class Step:
    """What a solver's step returns: the next point, f at it, and the evaluations it took (per sample, or for all)."""

    z: Tensor
    fz: Tensor
    evaluations: int | Tensor = 1


class AbstractSolver(abc.ABC):
    """A method for z = f(z). Immutable: what a run remembers is in its state.

    A product with the Jacobian of f counts as one evaluation of f.
    """

    #: The batch is compacted once this part of it is idle: about when the copy of z, and of what the solver remembers, is paid
    #: back by the evaluations saved.
    idle_part: ClassVar[float] = 1 / 16
    #: Whether `step` hands `Point.spare` to f, and keeps no tensor of a point beyond that step.
    uses_spare: ClassVar[bool] = False

    @property
    def is_plain(self) -> bool:
        """Whether a step is z <- f(z), nothing else: the loop may then take some by itself."""
        return False

    @property
    def skips(self) -> bool:
        """Whether `step` takes `Point.skip` steps more, which cost less because nobody looks at them."""
        return False

    @abc.abstractmethod
    def init(self, f: AbstractMap, point: Point) -> Any:
        """The state of a run that starts at `point`."""

    @abc.abstractmethod
    def step(self, state: Any, f: AbstractMap, point: Point) -> Step:
        """The next evaluated point. Row i depends on row i of everything alone."""

    def take(self, state: Any, rows: Tensor) -> Any:
        """The state of the samples `rows`: every tensor in it is batch first, unless overridden."""
        if state is None:
            return None
        return {key: value[rows] if isinstance(value, Tensor) else value for key, value in state.items()}

    def stages(self) -> list[tuple[AbstractSolver, AbstractWatch | None]]:
        """The solvers to run one after another, each with what decides that a sample goes on to the next."""
        return [(self, None)]


class AbstractWatch(abc.ABC):
    """Watches one stage of a run and tells, per sample, when the next solver should take over."""

    @property
    def wants_next(self) -> bool:
        """Whether it must see the very next step."""
        return False

    @abc.abstractmethod
    def see(self, count: int, point: Point) -> Tensor | None:
        """(batch,) bool, or None for 'nobody now', after `count` steps of the stage; not called at every step.

        Must judge each sample by what that sample showed alone.
        """

    @abc.abstractmethod
    def take(self, rows: Tensor) -> None:
        """Only these rows go on."""


def check_positive_integer(owner: str, name: str, value: object) -> None:
    """One sentence for a bad integer option."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidArgument(f"The {name!r} parameter of {owner} must be an integer of at least 1. Got {value!r} instead.")


def check_interval(
    owner: str, name: str, value: object, *, low: float, high: float = float("inf"), closed: str = "right"
) -> None:
    """One sentence for a bad real option. `closed` is "left", "right", "both" or "neither"."""
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high and abs(value) < float("inf")
    if ok and value == low:
        ok = closed in ("left", "both")
    if ok and value == high:
        ok = closed in ("right", "both")
    if not ok:
        left, right = (
            "[" if closed in ("left", "both") else "(",
            "]" if closed in ("right", "both") and high < float("inf") else ")",
        )
        bounds = f"{left}{low:g}, {high:g}{right}"
        raise InvalidArgument(f"The {name!r} parameter of {owner} must be a float in {bounds}. Got {value!r} instead.")


def row_dot(a: Tensor, b: Tensor) -> Tensor:
    """(batch,) inner products of rows."""
    return torch.linalg.vecdot(a, b)
