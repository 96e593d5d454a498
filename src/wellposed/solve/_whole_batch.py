"""Maps around a map: for all its rows only, with the batch as one sample, with a count."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from wellposed.errors import InvalidArgument, InvalidType
from wellposed.linalg.jacobian import AbstractJacobian, ProductJacobian
from wellposed.solve._samples import NUMBERS, Outcome
from wellposed.solve.map import AbstractMap, StandingRows
from wellposed.solve.solver import AbstractSolver, Point, Step


class Together(AbstractMap):
    """A map that is only evaluated for all its rows: those of finished samples stand still.

    Args:
        f: The map.
        z: (batch, features) where it was evaluated last. fz: (batch, features) f there.
    """

    def __init__(self, f: AbstractMap, z: Tensor, fz: Tensor) -> None:
        self.inner = f
        self._seen = (z, fz)

    def __call__(self, z: Tensor, out: Tensor | None = None) -> Tensor:
        value = self.inner(z)
        self._seen = (z, value)
        return value

    def tracked(self, z: Tensor) -> Tensor:
        return self.inner.tracked(z)

    def take(self, rows: Tensor) -> AbstractMap:
        return StandingRows(self, *self._seen, rows)

    def jacobian(self, z: Tensor) -> AbstractJacobian:
        return self.inner.jacobian(z)


class RegroupedMap(AbstractMap):
    """A map of rows whose samples are several rows each; it costs what the map of rows costs."""

    regroups = True

    def __init__(self, f: AbstractMap) -> None:
        self._f = f

    @property
    def built_in(self) -> bool:
        return self._f.built_in

    @property
    def cost(self) -> tuple[float, int] | None:  # type: ignore[override]  # read only here
        return self._f.cost


class WholeBatch(RegroupedMap):
    """A map of a batch whose rows depend on each other, as a map of one row.

    Args:
        f: The map.
        shape: (batch, features) of its states.
    """

    def __init__(self, f: AbstractMap, shape: torch.Size) -> None:
        super().__init__(f)
        self._shape = shape

    def __call__(self, z: Tensor, out: Tensor | None = None) -> Tensor:
        return self._f(z.reshape(self._shape)).reshape(1, -1)

    def tracked(self, z: Tensor) -> Tensor:
        return self._f.tracked(z.reshape(self._shape)).reshape(1, -1)

    def rows(self, z: Tensor) -> Tensor:
        return self._f.rows(z.reshape(self._shape))

    def inputs(self) -> tuple[Tensor, ...]:
        return self._f.inputs()

    def with_inputs(self, *inputs: Tensor) -> WholeBatch:
        return WholeBatch(self._f.with_inputs(*inputs), self._shape)

    def take(self, rows: Tensor) -> AbstractMap:
        return self  # there is only one row

    def jacobian(self, z: Tensor) -> AbstractJacobian:
        inner, shape = self._f.jacobian(z.reshape(self._shape)), self._shape
        return ProductJacobian(
            z,
            lambda u: inner.mv(u.reshape(shape)).reshape(u.shape),
            lambda u: inner.rmv(u.reshape(shape)).reshape(u.shape),
            value=None if inner.value is None else inner.value.reshape(z.shape),
            setup=inner.setup,
        )

    def forget(self) -> None:
        self._f.forget()


class CountedMap(AbstractMap):
    """A map that counts the evaluations of each row: a solver need not report them right.

    Args:
        f: The map.
        counts: (batch,) evaluations so far, shared by all parts of the map.
        settled: (batch,) those up to the last step, shared likewise.
        rows: (k,) the samples of the batch that the rows of f are.
    """

    def __init__(self, f: AbstractMap, counts: Tensor, settled: Tensor, rows: Tensor) -> None:
        self.inner, self._counts, self._settled, self._rows = f, counts, settled, rows
        self.writes_out, self.leaves_at_once = f.writes_out, f.leaves_at_once

    @classmethod
    def of(cls, f: AbstractMap, batch: int, device: torch.device) -> CountedMap:
        """The map of a whole batch that has been evaluated once."""
        once = torch.ones(batch, dtype=torch.int64, device=device)
        return cls(f, once, once.clone(), torch.arange(batch, device=device))

    def after_step(self) -> Tensor:
        """(k,) evaluations of these rows; a step counts as at least one, so that every run ends."""
        counts = torch.maximum(self._counts[self._rows], self._settled[self._rows] + 1)
        self._counts[self._rows] = self._settled[self._rows] = counts
        return counts

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)  # what else the map offers to a solver that knows it

    @property
    def built_in(self) -> bool:
        return self.inner.built_in

    @property
    def cost(self) -> tuple[float, int] | None:  # type: ignore[override]  # read only here
        return self.inner.cost

    def __call__(self, z: Tensor, out: Tensor | None = None) -> Tensor:
        self.count(1)
        return self.inner(z, out=out)

    def tracked(self, z: Tensor) -> Tensor:
        self.count(1)
        return self.inner.tracked(z)

    def inputs(self) -> tuple[Tensor, ...]:
        return self.inner.inputs()

    def with_inputs(self, *inputs: Tensor) -> CountedMap:
        return CountedMap(self.inner.with_inputs(*inputs), self._counts, self._settled, self._rows)

    def take(self, rows: Tensor) -> CountedMap:
        return CountedMap(self.inner.take(rows), self._counts, self._settled, self._rows[rows])

    def jacobian(self, z: Tensor) -> AbstractJacobian:
        jacobian = self.inner.jacobian(z)
        self.count(jacobian.setup)
        return _CountedJacobian(jacobian, self)

    def forget(self) -> None:
        self.inner.forget()

    def count(self, evaluations: int) -> None:
        """Adds evaluations, or products with the Jacobian, of every row."""
        self._counts[self._rows] += evaluations


class _CountedJacobian(ProductJacobian):
    """A Jacobian whose products count as evaluations."""

    def __init__(self, inner: AbstractJacobian, f: CountedMap) -> None:
        super().__init__(inner.point, inner.mv, inner.rmv, value=inner.value, setup=inner.setup)
        self._inner, self._f = inner, f

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def mv(self, u: Tensor) -> Tensor:
        self._f.count(1)
        return super().mv(u)

    def rmv(self, u: Tensor) -> Tensor:
        self._f.count(1)
        return super().rmv(u)


def as_batch(outcome: Outcome, shape: torch.Size) -> Outcome:
    """From one sample that is a whole batch: every row has the status of the batch."""
    rows = torch.arange(shape[0])
    history = [(rows, steps.expand(shape[0]), r.expand(shape[0])) for _, steps, r in outcome.history]
    image = None if outcome.image is None else outcome.image.reshape(shape)
    numbers = {name: getattr(outcome, name).expand(shape[0]).clone() for name in NUMBERS}
    numbers |= {"image": image, "history": history, "plain_factor": None}
    return replace(outcome, value=outcome.value.reshape(shape), **numbers)


def as_one(outcome: Outcome) -> Outcome:
    """The inverse of `as_batch`."""
    numbers = {name: getattr(outcome, name)[:1] for name in NUMBERS}
    return replace(
        outcome, value=outcome.value.reshape(1, -1), image=None, recorded=None, history=[], plain_factor=None, **numbers
    )


def check_step(solver: AbstractSolver, step: Any, point: Point, *, counted: bool) -> None:
    """Raises for a step that is not the next evaluated point of every row.

    Args:
        solver: The method. step: What it returned at `point`.
        point: The point.
        counted: Whether the map counts its evaluations, and those of the step are not read.
    """
    owner = f"{type(solver).__name__}.step"
    if not isinstance(step, Step):
        raise InvalidType(f"{owner} must return a Step(z, fz), the next point and f at it; got {type(step).__name__}.")
    for name, rows in (("z", step.z), ("fz", step.fz)):
        if rows.shape != point.z.shape or rows.dtype != point.z.dtype:
            raise InvalidArgument(
                f"{owner} must keep the shape and dtype of Point.z, {tuple(point.z.shape)} and {point.z.dtype}; "
                f"Step.{name} has {tuple(rows.shape)} and {rows.dtype}."
            )
    claimed = step.evaluations
    if counted or (isinstance(claimed, int) and claimed >= 1):
        return
    if isinstance(claimed, int) or bool((claimed < 1).any()):
        raise InvalidArgument(f"{owner} must report at least 1 evaluation of f; Step.evaluations is {claimed}.")
