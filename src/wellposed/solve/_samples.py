"""The samples of one run: the active ones, when each is measured, and all results.

Numbers per sample are numpy arrays on the host: few numbers take a tenth of the time of torch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from wellposed._tree import Array, host_dtype, relative, to_device, to_host

JUDGED_AT = frozenset(5 * 2**k for k in range(20))  #: Steps of a stage after which switching rules judge a sample.
PART, FIRST_PART = 0.95, 0.5  #: The part of the predicted steps before the next measurement; the first factor errs most.
FAR = 1e3  #: From this many times its target on a sample is first measured where it is judged: few steps hardly suffice.
MARGIN = 0.2  #: Steps added to a prediction for each step of a stride beyond one: residuals fall more slowly than at first.
FURTHEST = 16  #: The next measurement is at most this many steps ahead, or a quarter of the steps taken: factors change.
GRID = 5  #: A measurement that is far ahead is made at a multiple of this: the samples of a batch share it.
FEW_STEPS = 10.0  #: A sample predicted to need more steps beyond the next of `JUDGED_AT` is slow: it is measured there too.
RUNAWAY_LIMIT, FALLEN = 10.0, 0.1  #: If |f(z)| has grown by this factor, |f(z) - z| must be this part of the largest.
NUMBERS = ("g_norm", "f_norm", "steps", "codes", "rate")  #: What an outcome holds per sample, besides values.
NO_NUMBERS = torch.empty(0, dtype=torch.int64)
Numbers = TypeVar("Numbers", Tensor, Array)  #: One per sample, on a device or on the host.


def ran_away(r: Numbers, s: Numbers, first_s: Numbers, worst_r: Numbers, atol: float, eps: float) -> Numbers:
    """(rows,) where |f(z) - z| is small relative to |f(z)| only because that grew.

    With f(z) = z + tanh(x - z) any rtol is met at z = 1e9: |f(z) - z| must have fallen too."""
    away = (s > RUNAWAY_LIMIT * first_s) & ~((r <= FALLEN * worst_r) & (r + 8 * eps * s <= 0.5 * worst_r))
    return away & (r > atol) if atol > 0 else away


@dataclass
class ActiveSamples:
    """Samples that are still being solved: their present point, and the best point of each."""

    index: Array  # (rows,) which samples of the whole batch
    z: Tensor
    fz: Tensor
    evaluations: Array  # (rows,)
    first_r: Array  # (rows,) |f(z) - z| and |f(z)| at the start of the run
    first_s: Array
    worst_r: Array  # (rows,) the largest |f(z) - z| at which the sample was judged
    best_z: Tensor
    best_r: Array  # (rows,) |f(z) - z| and |f(z)| there
    best_s: Array
    best_f: Tensor | None  # f(best_z), if it is kept
    trail: tuple[Tensor, ...] = ()  # the points before z, if plain steps led from one to the next
    ahead: Tensor | None = None  # f(fz), if it is known; NaN in rows where it is not

    @classmethod
    def at_start(cls, z: Tensor, fz: Tensor, keep_image: bool) -> ActiveSamples:
        """All samples of z, with f evaluated once."""
        unknown = np.full(batch := z.shape[0], np.inf, dtype=host_dtype(z.dtype))
        once, worst = np.ones(batch, dtype=np.int64), np.zeros_like(unknown)
        return cls(np.arange(batch), z, fz, once, unknown, unknown, worst, z, unknown, unknown, fz if keep_image else None)

    def most(self, idle: Array | None) -> int:
        """The largest number of evaluations of a sample that is not (rows,) `idle`."""
        return int((self.evaluations if idle is None else self.evaluations[~idle]).max())

    def tensors(self) -> tuple[Tensor | None, ...]:
        """The points that are needed."""
        return (self.z, self.fz, self.best_z, self.best_f, *self.trail)

    def take(self, rows: Array) -> ActiveSamples:
        """Some of the rows; a tensor in two fields is copied once."""
        on_device, taken = to_device(rows, self.z.device), {}

        def part(value: Any) -> Any:
            if isinstance(value, Tensor):
                if id(value) not in taken:
                    taken[id(value)] = value.index_select(0, on_device)
                return taken[id(value)]
            if isinstance(value, tuple):
                return tuple(map(part, value))
            return None if value is None else value[rows]

        return ActiveSamples(*map(part, vars(self).values()))

    @staticmethod
    def cat(parts: list[ActiveSamples]) -> ActiveSamples:
        """All samples of the parts, in the order of the batch."""
        if len(parts) == 1:
            return parts[0]
        known, ahead = min(len(part.trail) for part in parts), any(part.ahead is not None for part in parts)
        parts = [replace(part, trail=part.trail[len(part.trail) - known :]) for part in parts]
        parts = [replace(p, ahead=torch.full_like(p.fz, torch.nan)) if ahead and p.ahead is None else p for p in parts]

        def joined(columns: tuple[Any, ...]) -> Any:
            if isinstance(columns[0], tuple):
                return tuple(map(torch.cat, zip(*columns, strict=True)))
            if isinstance(columns[0], Tensor):
                return torch.cat(columns)
            return None if columns[0] is None else np.concatenate(columns)

        samples = ActiveSamples(*map(joined, zip(*(vars(part).values() for part in parts), strict=True)))
        return samples.take(samples.index.argsort())

    def keep_first(self, r: Array, s: Array) -> None:
        """Remembers the norms at the start of the run, through all its stages."""
        new = np.isinf(self.first_r)
        self.first_s, self.first_r = np.where(new, s, self.first_s), np.where(new, r, self.first_r)

    def keep_best(self, r: Array, s: Array, better: Array, left: Array | None) -> None:
        """Remembers points better than any before; rows that have `left` need none."""
        if (better if left is None else better | left).all():  # by reference: no copy
            self.best_z, self.best_r, self.best_s = self.z, r, s
            self.best_f = None if self.best_f is None else self.fz
        elif better.any():
            mask = to_device(better, self.z.device).unsqueeze(1)
            self.best_z = torch.where(mask, self.z, self.best_z)
            if self.best_f is not None:
                self.best_f = torch.where(mask, self.fz, self.best_f)
            self.best_r, self.best_s = np.where(better, r, self.best_r), np.where(better, s, self.best_s)

    def ran_away(self, r: Array, s: Array, atol: float) -> Array:
        if s.max() <= RUNAWAY_LIMIT * self.first_s.min():
            return np.zeros(r.shape[0], dtype=bool)  # the usual case
        return ran_away(r, s, self.first_s, self.worst_r, atol, float(np.finfo(r.dtype).eps))

    def gather(self, target: Tensor, chosen: Array, done: Array, present: Tensor, best: Tensor) -> None:
        """Writes values of chosen rows: the present point if it converged, else the best."""
        part = present.index_select(0, rows := to_device(chosen, present.device))  # twice as fast as present[rows]
        if best is not present and not done.all():
            part = torch.where(to_device(done, present.device).unsqueeze(1), part, best.index_select(0, rows))
        target.index_copy_(0, to_device(self.index[chosen], present.device), part)


@dataclass
class Outcome:
    """Results of all samples, filled while samples leave the loop. Numbers are on the host.

    Attributes:
        value: (batch, features). g_norm, f_norm: (batch,) |f(z) - z| and |f(z)| there.
        steps, codes: (batch,) evaluations, and values of `Status`.
        rate: (batch,) mean factor of |f(z) - z| per evaluation. image: f at `value`, if kept.
        history: [(samples, their evaluations, their relative residuals)], if recorded.
        coupled: The batch was solved as one sample. note: Why f did not confirm the answer, or "".
        at_once: f at `value` if all samples converged at this evaluation of the whole batch.
        recorded: f at `value` with its graph, and a `sequence_number` from before it, if recorded.
        lent: `value` is a point of the run, of which only the rows with a status are answers.
        plain_factor: (batch,) `rate` if only plain steps were taken, infinite if they led away.
    """

    value: Tensor
    g_norm: Tensor = NO_NUMBERS
    f_norm: Tensor = NO_NUMBERS
    steps: Tensor = NO_NUMBERS
    codes: Tensor = NO_NUMBERS
    rate: Tensor = NO_NUMBERS
    image: Tensor | None = None
    history: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)
    coupled: bool = False
    note: str = ""
    at_once: Tensor | None = None
    recorded: tuple[Tensor, int] | None = None
    lent: bool = False
    plain_factor: Any = None

    def allocated(self) -> Outcome:
        """With memory for values that are not known yet, in the place of the start."""
        if self.codes is NO_NUMBERS:
            z, batch = self.value, self.value.shape[0]
            self.g_norm, self.f_norm, self.rate = torch.full((3, batch), torch.nan, dtype=z.dtype)
            self.steps, self.codes = torch.zeros((2, batch), dtype=torch.int64)
            self.value = torch.empty(z.shape, dtype=z.dtype, device=z.device)
            self.image = None if self.image is None else torch.empty_like(self.value)
        return self

    def write(self, index: Array | None, *numbers: Array) -> None:
        """The `NUMBERS` of some samples, or of all if no (samples,) `index` is given."""
        for name, values in zip(NUMBERS, numbers, strict=True):
            if index is None:
                setattr(self, name, torch.from_numpy(values))
            else:
                getattr(self, name).numpy()[index] = values

    def add_to_history(self, samples: ActiveSamples, r: Array, s: Array, idle: Array | None) -> None:
        """The residuals of the samples that are not (rows,) `idle`."""
        active, numbers = slice(None) if idle is None else ~idle, (samples.index, samples.evaluations, r, s)
        index, evaluations, r_, s_ = (torch.from_numpy(n[active]) for n in numbers)
        self.history.append((index, evaluations, relative(r_, s_)))

    @property
    def is_good(self) -> bool:
        """Whether all samples converged, and nothing else is to be said."""
        return not (self.coupled or self.note or to_host(self.codes).any())


class ResidualSchedule:
    """The steps at which the samples of one stage are measured.

    Each sample is measured where its own residuals predict, so its answer does not depend on its
    neighbours. Slow samples are measured at `JUDGED_AT` too.

    Args:
        rows: How many samples.
        first, far: The first step measured, and that of samples `FAR` from their target; 0 for all.
        few: In the place of `FEW_STEPS`; below 0 every sample is slow.
        stride, at: Slow samples are measured at `at`; above 1, others there and at its multiples.
        factor: (rows,) `Outcome.plain_factor`; it predicts the first measurement, if that is near.
    """

    def __init__(self, rows: int, *, first: int, far: int, few: float, stride: int, at: frozenset[int], factor: Any) -> None:
        self._first, self._far = (GRID, GRID) if stride > 1 else (first, far)
        self._few, self._stride, self._at, self._factor = few, stride, at, factor
        self._due = np.zeros(rows, dtype=np.int64)
        self.slow = np.ones(rows, dtype=bool)  # (rows,) the samples that a switching rule may judge
        # (rows,) step, or target if all are due at every step, and residual of the last measurement
        self._before: tuple[Array, Array] | None = None
        self._start = np.zeros(0)  # (rows,) the residuals at the start

    def due(self, count: int) -> Array | None:
        """(rows,) bool: the samples judged after `count` steps; None for all."""
        due = (self._due <= count) | (self.slow if count in self._at else False)
        return None if not self._first or due.all() else due

    def foretold(self) -> Array | bool:
        """(rows,) samples that are first measured where the factor predicted, until they are."""
        return False if self._factor is None or self._before is None else ~self.slow & (self._before[0] == 0)

    def expects_all(self, count: int, idle: Array | None) -> bool:
        """Whether all samples that are not (rows,) `idle` are predicted to be done at `count`."""
        if self._before is None or not self._first:  # of two predicted steps one may do
            return 0 < self.ahead(count - 1, np.zeros_like(self.slow) if idle is None else idle) <= 2
        due = (self._due <= count) & (self._before[0] > 0)
        return bool((due if idle is None else due | idle).all())

    def one_more(self, count: int, done: Array) -> int:
        """The stride, if all samples that are not (rows,) `done` are due after one; else 0."""
        later = ((self._due > count + self._stride) | self.slow) & ~done
        return 0 if self._stride == 1 or later.any() else self._stride

    def judges(self, count: int) -> bool:
        """Whether a switching rule judges a sample now."""
        return count in self._at and bool(self.slow.any())

    @np.errstate(all="ignore")
    def update(self, count: int, r: Array, target: Array, due: Array | None) -> None:
        """Sets the next measurement of the samples that were `due(count)`, with residuals r."""
        if not self._first:
            self._before, self._start = (target, r), self._start if count else r
            return
        if self._before is None:
            self._due = np.where(r > FAR * target, self._far, self._first)
            self._before, self._start = (np.full_like(self._due, count), r), r
            if self._factor is not None:
                wanted = np.log(target / r) / np.log(self._factor)
                self.slow = ~((wanted >= 1) & (wanted <= FURTHEST))
                self._due = np.where(self.slow, self._due, self._next(count, wanted))
            return
        then, before = self._before
        # log of what is missing / log of the factor: NaN or negative for a factor of 1 or more
        wanted = np.log(target / r) / np.log(r / before) * (count - then)
        # a residual that is still above the first one may end suddenly: a nilpotent W makes it rise, then 0
        later = self._next(count, np.where(r < self._start, wanted, 0.0))
        judged = min((step for step in self._at if step > count), default=count)
        slow = ~((wanted >= 0) & (wanted <= self._few + judged - count)) if self._few >= 0 else self.slow
        now = True if due is None else due
        self._before = np.where(now, count, then), np.where(now, r, before)
        self._due, self.slow = np.where(now, later, self._due), np.where(now, slow, self.slow)

    def _next(self, count: int, wanted: Array) -> Array:
        """(rows,) when to measure samples that should be done `wanted` steps after `count`."""
        ahead = (FIRST_PART if count == 1 else PART) * wanted if self._stride == 1 else wanted + MARGIN * (self._stride - 1)
        ahead = np.where(ahead >= 1, np.minimum(ahead, max(FURTHEST, count // 4)), 1.0)
        step: Array = count + ahead.astype(np.int64)
        if self._stride > 1:  # the first multiple at which the sample should be done: a step too many costs little
            return (step // self._stride + 1) * self._stride
        return np.where(ahead < GRID, step, step // GRID * GRID)

    def next_due(self, count: int, idle: Array | None) -> int:
        """The first step from `count` on at which a sample is due that is not (rows,) `idle`."""
        if not self._first:
            return count
        due, slow = (self._due, self.slow) if idle is None else (self._due[~idle], self.slow[~idle])
        last = max(count, int(due.min())) if due.shape[0] else count
        return next((step for step in range(count, last) if step in self._at), last) if slow.any() else last

    @np.errstate(all="ignore")
    def ahead(self, count: int, idle: Array) -> int:
        """How many steps are planned, or predicted, for samples not `idle`; 0 if none are."""
        if idle.all() or self._before is None or not (self._first or count):
            return 0
        if self._first:
            return int(self._due[~idle].max()) - count
        target, r, start = (numbers[~idle] for numbers in (*self._before, self._start))
        wanted = np.log(target / r) / np.log(r / start) * count
        return int(np.where((wanted >= 0) & (wanted < FURTHEST), wanted + 1, FURTHEST).max())

    def take(self, rows: Array) -> None:
        """Keeps only these rows."""
        self._due, self.slow = self._due[rows], self.slow[rows]
        if self._before is not None:
            self._before, self._start = (self._before[0][rows], self._before[1][rows]), self._start[rows]
