"""Steps of solvers that are not of this package: their form is checked, and their evaluations are counted in the map."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wellposed.errors import InvalidArgument, InvalidType
from wellposed.linalg.jacobian import AbstractJacobian
from wellposed.solve._map import AbstractMap, is_built_in
from wellposed.solve.solver import AbstractSolver, Point, Step

__all__ = ["CountedMap", "check_step"]


def check_step(solver: AbstractSolver, step: Any, point: Point, f: AbstractMap) -> None:
    """One sentence for a step that is not the next evaluated point of every row."""
    if not isinstance(step, Step):
        raise InvalidType(
            f"{type(solver).__name__}.step must return a Step(z, fz), the next point and f at it; got {type(step).__name__}."
        )
    for name, rows in (("z", step.z), ("fz", step.fz)):
        if rows.shape != point.z.shape or rows.dtype != point.z.dtype:
            raise InvalidArgument(
                f"{type(solver).__name__}.step must keep the shape and dtype of Point.z, {tuple(point.z.shape)} and "
                f"{point.z.dtype}; Step.{name} has {tuple(rows.shape)} and {rows.dtype}."
            )
    claimed = step.evaluations
    if isinstance(f, CountedMap) or (isinstance(claimed, int) and claimed >= 1):
        return
    if isinstance(claimed, int) or (not is_built_in(solver) and bool((claimed < 1).any())):
        raise InvalidArgument(
            f"{type(solver).__name__}.step must report at least 1 evaluation of f; Step.evaluations is {claimed}."
        )


class CountedMap(AbstractMap):
    """A map that counts the evaluations of each row, so that a budget does not depend on what a solver reports.

    Args:
        f: The map.
        counts: (batch,) evaluations so far, shared by all parts of the map.
        settled: (batch,) those up to the last step, shared likewise.
        rows: (k,) the samples of the batch that the rows of f are.
    """

    def __init__(self, f: AbstractMap, counts: Tensor, settled: Tensor, rows: Tensor) -> None:
        self.inner, self._counts, self._settled, self._rows = f, counts, settled, rows
        self.writes_out, self.steady = f.writes_out, f.steady

    @classmethod
    def of(cls, f: AbstractMap, batch: int, device: torch.device) -> CountedMap:
        """The map of a whole batch, whose first evaluation was made already."""
        once = torch.ones(batch, dtype=torch.int64, device=device)
        return cls(f, once, once.clone(), torch.arange(batch, device=device))

    def after_step(self) -> Tensor:
        """(k,) the evaluations of these rows; a step counts as one at least, so that every run comes to an end."""
        counts = torch.maximum(self._counts[self._rows], self._settled[self._rows] + 1)
        self._counts[self._rows] = self._settled[self._rows] = counts
        return counts

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)  # what else the map offers to a solver that knows it

    @property
    def built_in(self) -> bool:
        return self.inner.built_in

    @property
    def leaves_at_once(self) -> bool:
        return self.inner.leaves_at_once

    def __call__(self, z: Tensor, out: Tensor | None = None) -> Tensor:
        self._count(1)
        return self.inner(z, out=out)

    def tracked(self, z: Tensor) -> Tensor:
        self._count(1)
        return self.inner.tracked(z)

    def inputs(self) -> tuple[Tensor, ...]:
        return self.inner.inputs()

    def with_inputs(self, *inputs: Tensor) -> CountedMap:
        return CountedMap(self.inner.with_inputs(*inputs), self._counts, self._settled, self._rows)

    def take(self, rows: Tensor) -> CountedMap:
        return CountedMap(self.inner.take(rows), self._counts, self._settled, self._rows[rows])

    def jacobian(self, z: Tensor) -> AbstractJacobian:
        jacobian = self.inner.jacobian(z)
        self._count(jacobian.setup)
        return _CountedJacobian(jacobian, self)

    def forget(self) -> None:
        self.inner.forget()

    def _count(self, evaluations: int) -> None:
        self._counts[self._rows] += evaluations


class _CountedJacobian(AbstractJacobian):
    """A Jacobian whose products count as evaluations."""

    def __init__(self, inner: AbstractJacobian, f: CountedMap) -> None:
        self._inner, self._f = inner, f
        self.setup = inner.setup

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    @property
    def at(self) -> Tensor:
        return self._inner.at

    def mv(self, u: Tensor) -> Tensor:
        self._f._count(1)
        return self._inner.mv(u)

    def rmv(self, u: Tensor) -> Tensor:
        self._f._count(1)
        return self._inner.rmv(u)
