"""The default solver: chooses while running."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from wellposed._torch import relative_cost
from wellposed._tree import Array, to_device, to_host
from wellposed.errors import InvalidType
from wellposed.solve._samples import FEW_STEPS, JUDGED_AT
from wellposed.solve.anderson import Anderson
from wellposed.solve.map import AbstractMap
from wellposed.solve.newton import NewtonKrylov
from wellposed.solve.solver import AbstractSolver, AbstractSwitchingRule, Picard, Point, Step
from wellposed.status import Status, if_it_stagnates

#: Operations of a step of Anderson acceleration beyond the evaluation of f.
OPERATIONS = 20
#: What a step of Anderson acceleration costs, in plain steps, if the cost of f is not known (a dense cell), and how many
#: its memory needs to build up: few, since it starts with the last plain steps.
USUAL_PRICE, WARM_UP = 1.5, 1.0
#: Up to this price every sample is judged that is not almost done; above it, those that need many plain steps.
LOW_PRICE, FEWEST_STEPS, MODERATE_STEPS = 1.6, 4.0, 10.0
ALMOST = 0.7  #: A sample is almost done if it needs at most this part of those steps.
#: Above this price, or if it is not known, a judgement costs as much as some plain steps, and fewer samples are judged:
#: those that need so many plain steps, and as many as this number of steps of acceleration cost.
HIGH_PRICE, MANY_PLAIN_STEPS, ACCELERATED_STEPS = 2.5, 15.0, 4.0
#: Up to this price samples are judged after 3 steps too, the first for which a factor is known, if they need some more.
VERY_LOW_PRICE, EARLY, VERY_FEW_STEPS = 1.2, JUDGED_AT | {3}, 6.0
#: Plain steps between measurements by the cost of a step (`AbstractMap.cost`): a measurement at which some samples
#: come to an end, and leave the batch, costs as much as several cheap steps.
STRIDES = ((3.0, 5), (256.0, 2))
#: Anderson gives up if it is predicted to need more than this many further steps.
MANY_STEPS = 50.0


@dataclass(frozen=True)
class Auto(AbstractSolver):
    r"""Plain iteration as long as that is cheapest, then Anderson acceleration, then Newton-Krylov.

    Every sample is judged by its own residuals alone, after 5, 10, 20, ... steps of a stage (after
    3 too where f is expensive), so its answer does not depend on its neighbours. From the last
    residuals g_k the factor q of plain iteration is measured, and with it the number N of plain
    steps to the tolerance is predicted. A sample switches

    - from `Picard` to `Anderson` if it does not contract (q >= 1), if N exceeds its budget, or if
      acceleration is predicted to cost less: with c the factor by which the least-squares
      combination of the last three residuals is below |g_k|, its predicted factor is q c^(1/3) per
      step. (For a map whose spectrum fills a disk, e.g. a random or orthogonal W, c is near 1 and
      plain steps are as good as any; for a smoothing map they are not.) Where q rises from step to
      step, plain steps are predicted to be slower still by the last rise. A sample whose residual
      becomes exactly 0 entry by entry, as along a directed chain, keeps to plain steps if they end
      within its budget;
    - from `Anderson` back to `Picard` if its residuals stall or its own predicted N is large: at a
      kink acceleration can be stuck where plain steps are not;
    - from there to `NewtonKrylov` if plain steps do not contract, or N exceeds the budget. Where f
      is known to be affine, as in a backward pass, a sample that does not contract is passed on to
      it at once: its Krylov space needs fewer products than acceleration. If plain steps of the
      forward solve led away, the backward pass takes only one of them before that.

    These predictions decide only about cost; the answer is judged by the residual, as with any
    solver. In an `EquilibriumLayer`, where a plain step of the cell costs less than a measurement,
    samples are measured after 5 steps and then at the multiple of 2 or 5 at which each should be
    done; where a step costs more, a sample far from its tolerance is first measured after 3 or 5.
    In a backward pass, a sample that took plain steps only in the solve is first measured, and
    judged, where the factor of that solve predicts its end, if that is at most 16 steps ahead. All
    of these may take some steps more than `Picard`.

    Args:
        plain, accelerated, newton: The solvers of the three stages.

    Examples:
        >>> import torch, wellposed as wp
        >>> c = torch.tensor([[0.1], [0.99], [1.5]], dtype=torch.float64)
        >>> solution = wp.fixed_point(lambda z, c: c * z + 1, torch.zeros_like(c), wp.Auto(), args=(c,))
        >>> solution.converged.tolist()
        [True, True, True]
    """

    plain: Picard = Picard()
    accelerated: Anderson = Anderson()
    newton: NewtonKrylov = NewtonKrylov()

    def __post_init__(self) -> None:
        for name, kind in (("plain", Picard), ("accelerated", Anderson), ("newton", NewtonKrylov)):
            if not isinstance(getattr(self, name), kind):
                raise InvalidType(f"The {name!r} parameter of Auto must be a {kind.__name__}; got {getattr(self, name)!r}.")

    def stages(self) -> list[tuple[AbstractSolver, AbstractSwitchingRule | None]]:
        return [
            (self.plain, _LeavePlain(self.accelerated)),
            (self.accelerated, _LeaveAccelerated()),
            (self.plain, _LeaveReturned()),
            (self.newton, None),
        ]

    def init(self, f: AbstractMap, point: Point) -> None:
        raise NotImplementedError("Auto has no own steps: the loop runs its stages.")

    def step(self, state: None, f: AbstractMap, point: Point) -> Step:
        raise NotImplementedError("Auto has no own steps: the loop runs its stages.")

    def advice(self, status: Status, rate: float) -> str:  # the other solvers were tried already
        if status is Status.MAX_STEPS and rate < 1:
            return f"Raise max_steps or loosen rtol.{if_it_stagnates(rate)}"
        if status is Status.NOT_FINITE:
            return super().advice(status, rate)
        no_contraction = "The map may not contract, or may have no fixed point"
        return f"{no_contraction}: constrain the cell, e.g. with Spectral(bound=0.95), or try another start."


class _LeavePlain(AbstractSwitchingRule):
    """From plain iteration to Anderson acceleration, which starts with the last plain steps."""

    uses_trail: ClassVar[bool] = True
    leaves_start: ClassVar[bool] = True

    def __init__(self, accelerated: Anderson) -> None:
        self._accelerated, self._price, self._few = accelerated, USUAL_PRICE, MANY_PLAIN_STEPS
        # (rows,) the last step at which a sample was judged, its norm, and the factor that was predicted from there
        self._before: tuple[Array, Array, Array] | None = None

    def judges_all(self, cost: tuple[float, int] | None, affine: bool) -> bool:
        if cost is not None:
            numbers = (4 + 2 * self._accelerated.memory) * cost[1]  # that a step reads or writes
            self._price = 1.0 + relative_cost(OPERATIONS, numbers, cost[0])
            self.stride = next((stride for limit, stride in STRIDES if cost[0] < limit), 1)
            self.judged_at = EARLY if self._price <= VERY_LOW_PRICE else JUDGED_AT
        if cost is not None and self._price <= LOW_PRICE:  # a measurement and the points kept cost little beside f
            self._few = self.few = VERY_FEW_STEPS if self._price <= VERY_LOW_PRICE else FEWEST_STEPS
        elif cost is not None:
            many = max(MANY_PLAIN_STEPS, ACCELERATED_STEPS * self._price)
            self._few = MODERATE_STEPS if self._price <= HIGH_PRICE else many
        return False

    @np.errstate(all="ignore")
    def decide(self, count: int, point: Point) -> Array | None:
        r, target = to_host(point.r), to_host(point.target)
        assert point.first is not None
        then, before, predicted = self._before or (np.zeros(r.shape[0]), point.first, np.zeros_like(r))
        due = True if point.due is None else point.due
        missing = np.log(target / r)
        now = q = (r / before) ** (1.0 / (count - then))
        followed, old = len(point.trail) >= 2, None
        if followed and self._few > VERY_FEW_STEPS:  # many cheap steps were taken, and residuals may fall more slowly now
            old = point.z - point.trail[-1]
            now = np.maximum(q, r / to_host(torch.linalg.vector_norm(old, dim=1)))
        remaining, budget = _steps(missing, now), to_host(point.budget)
        self._before = np.where(due, count, then), np.where(due, r, before), predicted
        due = ~((remaining < np.minimum(ALMOST * self._few, budget)) | ((now <= predicted) & (remaining <= budget))) & due
        if not due.any():
            return None  # the usual case
        if not followed:
            leave: Array = (~(q < 1) | (remaining > budget)) & due
            return leave
        gram = _gram(point, old, due)
        # |older| and |old|, since older = d2 + d1 + g and old = d1 + g
        oldest, older = np.sqrt(gram.sum(axis=(1, 2))), np.sqrt(gram[:, 1:, 1:].sum(axis=(1, 2)))
        last, before_last = r / older, older / oldest
        q = np.maximum(q, np.sqrt(r / oldest))  # of the last two steps: residuals fall more slowly than at first
        plain = _steps(missing, q)
        leave = (~(q < 1) | (plain > budget)) & due
        slow = ~(plain <= (self._few if self._few <= VERY_FEW_STEPS else min(ALMOST * self._few, FEW_STEPS))) & due & ~leave
        if slow.any():
            later = np.minimum(np.maximum(q, last + np.maximum(last - before_last, 0.0)), 0.5 + 0.5 * q)
            self._before = *self._before[:2], np.where(slow, later, predicted)
            cut = _cut(gram)
            accelerated = 1.0 + _steps(np.minimum(missing - np.log(cut), 0.0), q * cut ** (1 / 3))
            leave |= slow & (self._price * accelerated + WARM_UP < _steps(missing, later))
        return leave & ~(_steps_to_zero(point) <= budget) if leave.any() else leave

    def take(self, rows: Tensor) -> None:
        self._before = None if self._before is None else _taken(self._before, rows)


class _LeaveAccelerated(AbstractSwitchingRule):
    """From Anderson acceleration back to plain iteration."""

    leaves_start: ClassVar[bool] = True

    def __init__(self) -> None:
        self._r: list[Array] = []  # least residual up to each step

    @np.errstate(all="ignore")
    def decide(self, count: int, point: Point) -> Array | None:
        r = to_host(point.r)
        least = np.minimum(self._r[-1], r) if self._r else r
        self._r.append(least)
        if count == 0 and self.affine:
            return r >= point.first
        if count < 16 or count not in JUDGED_AT:
            return None
        q = (least / self._r[count // 2]) ** (1.0 / (count - count // 2))
        remaining = _steps_to_target(r, to_host(point.target), q)
        leave: Array = (remaining > MANY_STEPS) | (remaining > to_host(point.budget))
        return leave

    def take(self, rows: Tensor) -> None:
        self._r = list(_taken(self._r, rows))


class _LeaveReturned(AbstractSwitchingRule):
    """From plain iteration, after acceleration has failed, to Newton-Krylov.

    Residuals may rise at first, so a rate counts only after twenty steps; before that, only growth
    does.
    """

    leaves_start: ClassVar[bool] = True

    def __init__(self) -> None:
        self._r: dict[int, Array] = {}  # norms at the steps at which all are measured

    @np.errstate(all="ignore")
    def decide(self, count: int, point: Point) -> Array | None:
        if count and count not in JUDGED_AT:
            return None
        r = to_host(point.r)
        self._r[count] = r
        if count == 0 and self.affine:
            return r >= point.first
        if count < 20:
            return r > 10 * self._r[0]
        q = (r / self._r[count // 2]) ** (2.0 / count)
        leave: Array = ~(q < 1) | (_steps_to_target(r, to_host(point.target), q) > to_host(point.budget))
        return leave

    def take(self, rows: Tensor) -> None:
        self._r = dict(zip(self._r, _taken(self._r.values(), rows), strict=True))


def _taken(numbers: Iterable[Array], rows: Tensor) -> tuple[Any, ...]:
    chosen = to_host(rows)
    return tuple(array[chosen] for array in numbers)


def _steps_to_target(r: Array, target: Array, q: Array) -> Array:
    """(batch,) predicted steps at the factor q per step; infinite if q >= 1."""
    return _steps(np.log(target / r), q)


def _steps(missing: Array, q: Array) -> Array:
    """The same, given the log of the factor by which r must fall."""
    steps: Array = np.where(q < 1, missing / np.log(q), np.inf)
    return steps


def _gram(point: Point, old: Tensor | None, due: Array) -> Array:
    """(batch, 3, 3) products of d2 = older - old, d1 = old - g and g, the last steps.

    By one batched product of differences: the steps themselves may be almost equal. If few rows are
    due only theirs are computed, and the others are 1. `old` is z - trail[-1], if it is known.
    """
    few, z, newer, older, g = 4 * due.sum() < due.shape[0], point.z, point.trail[-1], point.trail[-2], point.g
    if few:
        rows = to_device(np.flatnonzero(due), g.device)
        z, newer, older, g = (x.index_select(0, rows) for x in (z, newer, older, g))
    if few or old is None:
        old = z - newer
    steps = torch.stack((torch.sub(newer, older).sub_(old), old - g, g), dim=1)
    products = to_host(torch.bmm(steps, steps.mT)).astype(np.float64)
    if not few:
        return products
    gram = np.ones((due.shape[0], 3, 3))
    gram[due] = products
    return gram


def _cut(gram: Array) -> Array:
    """(batch,) the least norm of an affine combination of the last three g, over |g|."""
    c, a, square = gram[:, 0, 0], np.maximum(gram[:, 1, 1], np.finfo(np.float64).tiny), gram[:, 2, 2]
    b, q, p = gram[:, 0, 1], gram[:, 0, 2], gram[:, 1, 2]
    # project g off d1, then off what d2 adds to d1
    c_rest, q_rest = c - b * b / a, q - b * p / a
    usable = c_rest > 1e-6 * c
    gain = p * p / a + np.where(usable, q_rest * q_rest / np.where(usable, c_rest, 1.0), 0.0)
    cut: Array = np.sqrt(np.maximum(square - gain, 0.0) / square)
    return cut


def _steps_to_zero(point: Point) -> Array:
    """(batch,) plain steps to g = 0 if as many entries become 0 as in the last two; else infinite.

    Along a directed chain, or in another map with a nilpotent Jacobian, the entries become exact
    one after the other, and |g| may not fall before the end.
    """
    if not bool((point.g == 0).any()):  # the usual case: counting takes ten times as long
        return np.full(point.g.shape[0], np.inf)
    left = to_host(torch.count_nonzero(point.g, dim=1))
    older, old = point.trail[-1] - point.trail[-2], point.z - point.trail[-1]
    before, between = (to_host(torch.count_nonzero(g, dim=1)) for g in (older, old))
    fallen = np.minimum(before - between, between - left)
    steps: Array = np.where(fallen > 0, left / np.maximum(fallen, 1), np.inf)
    return steps
