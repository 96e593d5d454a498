"""The loop: runs a solver until every sample has its verdict. Start reading here.

A sample leaves the loop, with its own status and its own count of evaluations, as soon as its residual meets the tolerance,
stops being finite, has grown beyond hope, or its budget is used up; the rows that remain are compacted. Nothing here knows
what the map is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wellposed.solve import _workspace as workspace
from wellposed.solve._active_samples import Rows
from wellposed.solve._counted import CountedMap, check_step
from wellposed.solve._map import AbstractMap, RowsCoupled
from wellposed.solve._outcome import Outcome, Tolerance, relative, scaled_norm
from wellposed.solve._residual_schedule import Pace
from wellposed.solve.solver import AbstractSolver, AbstractWatch, Point
from wellposed.status import Status

__all__ = ["iterate"]

#: A residual this many times the least one seen is called divergence: in float32 nothing of the start is left by then.
GROWTH_LIMIT = 1e8
#: Beyond this many times its first value, |f(z)| alone may not make a relative residual small: see `_Stage._ran_away`.
RUNAWAY_LIMIT = 10.0
#: Buffers kept for f to write to; a step needs one.
ENOUGH_FREE = 2


def iterate(
    f: AbstractMap,
    z: Tensor,
    solver: AbstractSolver,
    *,
    tolerance: Tolerance,
    max_steps: int,
    first: Tensor | None = None,
    record: bool = False,
    keep_image: bool = False,
) -> Outcome:
    """Solves z = f(z) for every row.

    Args:
        f: The map.
        z: (batch, features) the start; never written to.
        solver: How.
        tolerance: When a sample is done.
        max_steps: Evaluations of f that each sample may take part in, at least 1.
        first: f(z), if it is known already; it counts as an evaluation all the same.
        record: Whether to keep the residual of every sample at every step.
        keep_image: Whether to return f at the value as well.
    """
    outcome = Outcome.like(z, keep_image)
    batch = z.shape[0]
    if batch == 0:
        return outcome
    once = torch.ones(batch, dtype=torch.int64, device=z.device)
    unknown = torch.full((batch,), torch.inf, dtype=z.dtype, device=z.device)
    fz = f(z) if first is None else first
    best_f = fz if keep_image else None
    nothing = torch.zeros_like(unknown)
    rows = Rows(torch.arange(batch, device=z.device), z, fz, once, unknown, unknown, nothing, z, unknown, unknown, best_f)
    part = f
    for stage, watch in solver.stages():
        run = _Stage(part, rows, stage, watch=watch, tolerance=tolerance, max_steps=max_steps, outcome=outcome)
        handed = run.run(record)
        if not handed:
            break
        rows = Rows.cat(handed)
        rows = rows.take(rows.index.argsort())
        part = f.take(rows.index) if rows.index.shape[0] < batch else f
    return outcome


class _Stage:
    """One solver on a set of samples, until each has left or was handed on."""

    def __init__(
        self,
        f: AbstractMap,
        rows: Rows,
        solver: AbstractSolver,
        *,
        watch: AbstractWatch | None,
        tolerance: Tolerance,
        max_steps: int,
        outcome: Outcome,
    ) -> None:
        self.f, self.rows, self.solver, self.watch = f, rows, solver, watch
        self.tolerance, self.max_steps, self.outcome = tolerance, max_steps, outcome
        self.idle: Tensor | None = None  # (rows,) left already, not yet compacted away
        self.foreign = (rows.z, rows.fz)  # may be the caller's: their memory is not ours to reuse
        self.most = int(rows.evaluations.max())  # evaluations of the sample that has had most
        self.small = torch.finfo(rows.z.dtype).tiny ** 0.5 * 1e3  # norms below have lost digits to underflow
        self.handed: list[Rows] = []
        self.state: Any = None
        self.lent: list[Tensor] = []  # buffers of the workspace, full size
        self.free: list[Tensor] = []  # those, and other tensors of at least as many rows, that nobody reads
        self.pace = Pace(rows.z.shape[0], rows.z.device, ahead=f.steady and (solver.is_plain or solver.skips))

    def run(self, record: bool) -> list[Rows]:
        """Returns the samples that the next stage should take over."""
        differences = workspace.take(self.rows.fz)
        try:
            self._loop(record, differences)
        except RowsCoupled as found:
            # what the samples that have not left have come to: from there the batch is solved as one sample
            for part in (self.rows, *self.handed):
                self.outcome.value[part.index] = part.z
            found.evaluations, found.value = min(self.most + found.within + 1, self.max_steps), self.outcome.value
            raise
        escaped = {out.data_ptr() for out in (self.outcome.value, self.outcome.image) if out is not None}
        for buffer in (differences, *self.lent):
            if buffer.data_ptr() not in escaped:
                workspace.give(buffer)
        return self.handed

    def _loop(self, record: bool, differences: Tensor) -> None:
        count = 0
        while True:
            rows = self.rows
            g = torch.sub(rows.fz, rows.z, out=differences[: rows.z.shape[0]])
            r = torch.linalg.vector_norm(g, dim=1)
            s = torch.linalg.vector_norm(rows.fz, dim=1)
            target = self.tolerance.target(s)
            point = Point(rows.z, rows.fz, g, r, target, rows.evaluations, self.max_steps)
            if record:
                self._resolve_extremes(point, s)
                self._record(r, s)
            hand = self._hand_over(count, point)
            # The usual case in as few operations as can be: no sample has come to an end.
            due = self.pace.due(count) if self.most < self.max_steps else None
            onward = (r > target.clamp_min(self.small)) & (r < GROWTH_LIMIT * rows.best_r)
            for others in (self.idle, None if due is None else ~due):
                onward = onward if others is None else onward | others
            self.pace.see(count, r, target, due)
            if hand is None and self.most < self.max_steps and bool(onward.all()):
                self._keep_worst(r, due)
                if count == 0:
                    self._keep_first(r, s)
                if due is None:
                    self._keep_best(point, s, r < rows.best_r)
            else:
                kept = self._sort_out(point, s, hand, due)
                if kept is not None:
                    if kept.shape[0] == 0:
                        return
                    point = self._compact(kept, point)
                    rows = self.rows
            if count == 0:
                self.state = self.solver.init(self.f, point)
            point.spare = self._spare(rows)
            free = not record and (self.watch is None or not self.watch.wants_next)
            if free and self.solver.skips:
                point.skip = max(min(self.pace.next_look(count + 1, self.idle) - count, self.max_steps - self.most) - 1, 0)
            step = self.solver.step(self.state, self.f, point)
            check_step(self.solver, step, point, self.f)
            count += 1 + point.skip
            rows.z, rows.fz = step.z, step.fz
            self._release(point.z)
            if isinstance(self.f, CountedMap):
                rows.evaluations = self.f.after_step()
                self.most = int(rows.evaluations.max())
            else:
                rows.evaluations = rows.evaluations + step.evaluations
                self.most = self.most + step.evaluations if isinstance(step.evaluations, int) else int(rows.evaluations.max())
            if free and self.solver.is_plain:
                count += self._go_ahead(self.pace.next_look(count, self.idle) - count)

    def _go_ahead(self, steps: int) -> int:
        """Takes plain steps without measuring, as many as asked for and as the budget allows; returns how many."""
        steps = min(steps, self.max_steps - self.most)
        if steps <= 0:
            return 0
        rows = self.rows
        for _ in range(steps):
            old, spare = rows.z, self._spare(rows)
            rows.z, rows.fz = rows.fz, self.f(rows.fz, out=spare)
            self._release(old)
        rows.evaluations = rows.evaluations + steps
        self.most += steps
        return steps

    def _keep_worst(self, r: Tensor, due: Tensor | None) -> None:
        """Remembers the largest residual at which each sample was judged."""
        worst = torch.maximum(self.rows.worst_r, r)
        self.rows.worst_r = worst if due is None else torch.where(due, worst, self.rows.worst_r)

    def _hand_over(self, count: int, point: Point) -> Tensor | None:
        hand = None if self.watch is None else self.watch.see(count, point)
        return hand if hand is not None and bool(hand.any()) else None

    def _sort_out(self, point: Point, s: Tensor, hand: Tensor | None, due: Tensor | None) -> Tensor | None:
        """Gives verdicts to those that are due, keeps best points; returns the rows that go on if it is time to compact."""
        rows, r = self.rows, point.r
        self._resolve_extremes(point, s)
        lost = ~(r.isfinite() & s.isfinite())
        self._keep_worst(r, due)
        self._keep_first(r, s)
        met = r <= point.target
        runaway = met & self._ran_away(r, s)
        done = met & ~(lost | runaway)  # inf <= inf is no convergence
        grown = r > GROWTH_LIMIT * rows.best_r
        better = (r < rows.best_r) & ~runaway
        better |= rows.best_r.isinf()  # at the very first point there is nothing else to return
        if due is None:
            self._keep_best(point, s, better)
        leave = done | lost | grown | (rows.evaluations >= self.max_steps)
        leave = leave if due is None else leave & due
        away = leave if hand is None else leave | hand
        if self.idle is not None:
            leave, away = leave & ~self.idle, away & ~self.idle
        self._finish(leave, point, s, torch.where(done, 0, torch.where(lost, 3, torch.where(grown, 2, 1))))
        passed = (away & ~leave).nonzero().squeeze(1)
        if passed.shape[0]:
            self.handed.append(rows.take(passed))
        self.idle = away if self.idle is None else self.idle | away
        idle = int(self.idle.sum())
        if idle == 0:
            self.idle = None
            return None
        # Rows that hold NaN or run away go at once; f need not see them again.
        few = 0.0 if self.f.leaves_at_once else self.solver.idle_part * r.shape[0]
        if idle >= few or bool((leave & (lost | grown)).any()):
            return (~self.idle).nonzero().squeeze(1)
        return None

    def _ran_away(self, r: Tensor, s: Tensor) -> Tensor:
        """(rows,) where |f(z) - z| is small beside |f(z)| only because that grew.

        The residual of f(z) = z + tanh(x - z) is at most 1, so at z = 1e9 any rtol is met, and at 1e16 it even rounds to 0.
        Wherever |f(z)| has grown much, |f(z) - z| itself must have fallen, to half of the largest seen and beyond rounding.
        """
        rows = self.rows
        fallen = r + 8 * torch.finfo(r.dtype).eps * s <= 0.5 * rows.worst_r
        away = (s > RUNAWAY_LIMIT * rows.first_s) & ~fallen
        return away & (r > self.tolerance.atol) if self.tolerance.atol > 0 else away

    def _keep_first(self, r: Tensor, s: Tensor) -> None:
        """Remembers the norms at the start of the run, through all its stages."""
        rows = self.rows
        rows.first_s = torch.where(rows.first_r.isinf(), s, rows.first_s)
        rows.first_r = torch.where(rows.first_r.isinf(), r, rows.first_r)

    def _spare(self, rows: Rows) -> Tensor | None:
        """A buffer for f to write to, if it does."""
        if not self._reuses():
            return None
        if not self.free:
            self.lent.append(workspace.take(self.foreign[1]))
            self.free.append(self.lent[-1])
        return self.free.pop()[: rows.z.shape[0]]

    def _reuses(self) -> bool:
        return self.f.writes_out and self.solver.uses_spare

    def _release(self, old: Tensor) -> None:
        """Lets f write over a point of the past, unless somebody still needs it."""
        rows = self.rows
        needed = (*self.foreign, rows.z, rows.fz, rows.best_z, rows.best_f, *self.free)
        if len(self.free) < ENOUGH_FREE and self._reuses() and all(old is not other for other in needed):
            self.free.append(old)

    def _keep_best(self, point: Point, s: Tensor, better: Tensor) -> None:
        """Remembers the rows that are better than any before."""
        rows = self.rows
        before = rows.best_z
        if bool((better if self.idle is None else better | self.idle).all()):  # by reference: no copy
            rows.best_z, rows.best_r, rows.best_s = point.z, point.r, s
            rows.best_f = None if rows.best_f is None else point.fz
            self._release(before)
            return
        rows.best_z = torch.where(better.unsqueeze(1), point.z, rows.best_z)
        if rows.best_f is not None:
            rows.best_f = torch.where(better.unsqueeze(1), point.fz, rows.best_f)
        rows.best_r = torch.where(better, point.r, rows.best_r)
        rows.best_s = torch.where(better, s, rows.best_s)
        self._release(before)

    def _resolve_extremes(self, point: Point, s: Tensor) -> None:
        """Measures again, scaled, what is so small or large that its squares leave the dtype: 1e-25 is not 0."""
        odd = ((s < self.small) | ~(s.isfinite() & point.r.isfinite())).nonzero().squeeze(1)
        if odd.shape[0]:
            point.r[odd] = scaled_norm(point.g[odd])
            s[odd] = scaled_norm(point.fz[odd])
            point.target[odd] = self.tolerance.target(s[odd])

    def _finish(self, leave: Tensor, point: Point, s: Tensor, codes: Tensor) -> None:
        rows, out = self.rows, self.outcome
        chosen = leave.nonzero().squeeze(1)
        if chosen.shape[0] == 0:
            return
        done = codes == Status.CONVERGED
        whole = (
            chosen.shape[0] == out.value.shape[0] and bool(done.all()) and all(point.z is not other for other in self.foreign)
        )
        if whole:  # everyone at once: nothing to gather
            out.value = point.z
        else:
            self._gather(out.value, chosen, done, point.z, rows.best_z)
        if out.image is not None and rows.best_f is not None:
            if whole:
                out.image = point.fz
            else:
                self._gather(out.image, chosen, done, point.fz, rows.best_f)
        steps = rows.evaluations
        rate = (point.r / rows.first_r) ** (steps - 1).clamp_min(1).to(point.r.dtype).reciprocal()
        for target, source in (
            (out.g_norm, torch.where(done, point.r, rows.best_r)),
            (out.f_norm, torch.where(done, s, rows.best_s)),
            (out.steps, steps),
            (out.codes, codes),
            (out.rate, rate),
        ):
            target[rows.index[chosen]] = source[chosen]

    def _gather(self, target: Tensor, chosen: Tensor, done: Tensor, present: Tensor, best: Tensor) -> None:
        """Writes what the chosen rows return: the present point if it converged, else the best one."""
        part = present.index_select(0, chosen)  # twice as fast as present[chosen]
        converged = done[chosen]
        if best is not present and not bool(converged.all()):
            part = torch.where(converged.unsqueeze(1), part, best.index_select(0, chosen))
        target.index_copy_(0, self.rows.index[chosen], part)

    def _compact(self, kept: Tensor, point: Point) -> Point:
        """Only the rows that go on remain, everywhere."""
        self.rows = self.rows.take(kept)
        self.f = self.f.take(kept)
        self.state = self.solver.take(self.state, kept)
        if self.watch is not None:
            self.watch.take(kept)
        self.pace.take(kept)
        self.idle = None
        self.free = list(self.lent)  # what remains was copied, so they are all free
        self.most = int(self.rows.evaluations.max())
        return Point(
            self.rows.z,
            self.rows.fz,
            point.g.index_select(0, kept),
            point.r[kept],
            point.target[kept],
            self.rows.evaluations,
            self.max_steps,
        )

    def _record(self, r: Tensor, s: Tensor) -> None:
        active = slice(None) if self.idle is None else ~self.idle
        self.outcome.history.append((self.rows.index[active], self.rows.evaluations[active], relative(r, s)[active]))
