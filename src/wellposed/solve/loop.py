"""The loop: runs a solver until every sample has its status. Start reading here.

A sample leaves the loop, with its own status and its own count of evaluations, when its residual
meets the tolerance, is not finite, has grown too much, or its budget is used up; the remaining rows
are compacted. Residuals are measured where one could decide something (`ResidualSchedule`): a
measurement is one pass over the state and one transfer to the host, and nothing else waits for the
device. The loop does not depend on what the map is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from wellposed._tree import Array, measure, relative, to_device, to_host
from wellposed.solve._samples import JUDGED_AT, NUMBERS, ActiveSamples, Outcome, ResidualSchedule, give_buffer, take_buffer
from wellposed.solve._whole_batch import CountedMap
from wellposed.solve.map import AbstractMap, RowsCoupled
from wellposed.solve.solver import AbstractSolver, AbstractSwitchingRule, Point, Tolerance, check_step, is_built_in
from wellposed.status import Status

#: A residual this many times the least one seen is divergence: in float32 no digit of the start is left.
GROWTH_LIMIT = 1e8
ENOUGH_FREE = 2  #: Buffers kept for f to write to; a step needs one.
FIRST = 3  #: The first measurement of a solver that `skips`: its first steps may lead away.
TRAIL = 3  #: Points before the present one that are kept for the next solver.
LONG = 8  #: After so many steps with finished rows in the batch it is asked at every measurement whether to take them out.


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
        solver: The method.
        tolerance: When a sample is done.
        max_steps: Evaluations of f that each sample may take part in, at least 1.
        first: f(z), if it is known already; it still counts as an evaluation.
        record: Whether to keep the residual of every sample at every step.
        keep_image: Whether to return f at the value as well.
    """
    outcome, batch = Outcome.like(z, keep_image), z.shape[0]
    if batch == 0:
        return outcome
    samples = ActiveSamples.at_start(z, f(z) if first is None else first, keep_image)
    part = f
    for stage, rule in solver.stages():
        passed_on = _Stage(part, samples, stage, rule, tolerance, max_steps, outcome, record).run()
        if not passed_on:
            break
        samples = ActiveSamples.cat(passed_on)
        part = f.take(to_device(samples.index, z.device)) if samples.index.shape[0] < batch else f
    return outcome


class _Stage:
    """One solver on a set of samples, until each has left or is passed on to the next solver."""

    def __init__(
        self,
        f: AbstractMap,
        samples: ActiveSamples,
        solver: AbstractSolver,
        rule: AbstractSwitchingRule | None,
        tolerance: Tolerance,
        max_steps: int,
        outcome: Outcome,
        record: bool,
    ) -> None:
        self.f, self.samples, self.solver, self.rule = f, samples, solver, rule
        self.tolerance, self.max_steps, self.outcome, self.record = tolerance, max_steps, outcome, record
        self.idle: Array | None = None  # (rows,) left already, not yet compacted away
        self.waited = 0  # steps taken with those in the batch
        self.foreign = (samples.z, samples.fz)  # may belong to the caller: their memory must not be reused
        self.passed_on: list[ActiveSamples] = []
        self.state: Any = None
        self.reuses = f.writes_out and solver.uses_spare
        self.lent: list[Tensor] = []  # buffers of the workspace, full size
        self.free: list[Tensor] = []  # those, and other tensors of at least as many rows, without a reader
        self.plain = solver.is_plain and is_built_in(solver)
        judged = rule is not None and rule.judges_all(f.cost)
        first = 1 if self.plain else FIRST if solver.skips else 0
        stride = rule.stride if self.plain and rule is not None and f.strides else 1
        at = JUDGED_AT if rule is None else rule.judged_at
        self.schedule = ResidualSchedule(samples.z.shape[0], first=first, judged=judged, stride=stride, at=at)

    @property
    def most(self) -> int:
        """The largest number of evaluations of a sample that has not come to an end."""
        evaluations = self.samples.evaluations
        return int((evaluations if self.idle is None else evaluations[~self.idle]).max())

    def run(self) -> list[ActiveSamples]:
        """Returns the samples for the next stage."""
        differences = take_buffer(self.samples.fz)
        try:
            self._loop(differences)
        except RowsCoupled as found:
            # from the points of the samples that have not left, the batch is solved as one sample
            for part in (self.samples, *self.passed_on):
                self.outcome.value[to_device(part.index, part.z.device)] = part.z
            found.evaluations, found.value = min(self.most + found.within + 1, self.max_steps), self.outcome.value
            raise
        returned = {out.data_ptr() for out in (self.outcome.value, self.outcome.image) if out is not None}
        for buffer in (differences, *self.lent):
            if buffer.data_ptr() not in returned:
                give_buffer(buffer)
        return self.passed_on

    def _loop(self, differences: Tensor) -> None:
        count, rule = 0, self.rule
        while True:
            samples = self.samples
            g = torch.sub(samples.fz, samples.z, out=differences[: samples.z.shape[0]])
            r, s, ordinary = measure(g, samples.fz)
            target = self.tolerance.target(s)
            due = self.schedule.due(count) if self.most < self.max_steps else None
            asked = rule is not None and (not rule.uses_trail or count == 0 or self.schedule.judges(count))
            if asked or count == 0 or not self.plain:  # a plain step needs no point
                slow = self.schedule.slow if self.plain else None
                point: Any = Point.measured(samples, g, r, target, self.max_steps, due=slow)
            if self.record:
                self._add_to_history(r, s)
            switch = rule.decide(count, point) if rule is not None and asked else None
            switch = None if switch is None or not switch.any() else np.asarray(switch)
            if count == 0:
                samples.keep_first(r, s)
            calm = ordinary and switch is None and self.idle is None
            if calm and due is None and self._all_done(r, s, target):
                return
            self.schedule.update(count, r, target, due)
            above = r > target if self.idle is None else (r > target) | self.idle
            calm = ordinary and switch is None and self.most < self.max_steps and self.waited < LONG
            if calm and above.all() and r.max() < GROWTH_LIMIT * samples.best_r.min():
                self._continue(r, s, due)  # the usual case: no sample has come to an end
                kept = None
            else:
                kept = self._judge(count, r, s, target, due, switch)
            if kept is not None:
                if kept.shape[0] == 0:
                    return
                point = self._compact(kept, point)
                samples = self.samples
            if count == 0:
                self.state = self.solver.init(self.f, point)
                samples.trail = ()
            ahead = 1 if self.record else self.schedule.next_due(count + 1, self.idle) - count
            ahead = min(ahead, self.max_steps - self.most)
            count += ahead if self.plain or self.solver.skips else 1
            more: int | Tensor = ahead
            if self.plain:
                point = None  # would keep the memory of its tensors
                self._plain_steps(count - ahead, ahead)
            else:
                point.spare, point.skip = self._spare(), ahead - 1 if self.solver.skips else 0
                step = self.solver.step(self.state, self.f, point)
                check_step(self.solver, step, point, counted=isinstance(self.f, CountedMap))
                samples.z, samples.fz, more = step.z, step.fz, step.evaluations
                self._release(point.z)
            self.waited += 0 if self.idle is None else ahead
            if isinstance(self.f, CountedMap):
                samples.evaluations = to_host(self.f.after_step())
            else:
                samples.evaluations = samples.evaluations + (more if isinstance(more, int) else to_host(more))

    def _plain_steps(self, count: int, steps: int) -> None:
        """Takes plain steps without a measurement; keeps the points before a judgement."""
        samples, rule, f, reuses = self.samples, self.rule, self.f, self.reuses
        for taken in range(count + 1, count + steps + 1):  # the count alone decides: none switches because another is slow
            keep = rule is not None and rule.keeps(taken)
            old = samples.z
            fz = f(samples.fz, out=self._spare() if reuses and not keep else None)  # what is kept cannot be written over
            samples.z, samples.fz = samples.fz, fz
            samples.trail = (*samples.trail[1 - TRAIL :], old) if keep else ()
            if reuses and not keep:
                self._release(old)

    def _add_to_history(self, r: Array, s: Array) -> None:
        active = np.ones(r.shape[0], dtype=bool) if self.idle is None else ~self.idle
        index, evaluations = (torch.from_numpy(n[active]) for n in (self.samples.index, self.samples.evaluations))
        residual = relative(torch.from_numpy(r[active]), torch.from_numpy(s[active]))
        self.outcome.history.append((index, evaluations, residual))

    def _continue(self, r: Array, s: Array, due: Array | None) -> None:
        """Keeps what is known of samples none of which has come to an end."""
        samples = self.samples
        worst, better = np.maximum(samples.worst_r, r), r < samples.best_r
        samples.worst_r = worst if due is None else np.where(due, worst, samples.worst_r)
        better = better if self.idle is None else better & ~self.idle
        self._keep_best(r, s, better if due is None else better & due)

    def _all_done(self, r: Array, s: Array, target: Array) -> bool:
        """Ends the stage if every sample has converged, as most stages end."""
        if not (r <= target).all() or self.samples.ran_away(r, s, self.tolerance.atol).any():
            return False
        self._finish(np.ones(r.shape[0], dtype=bool), r, s, np.zeros(r.shape[0], dtype=np.int64))
        return True

    @np.errstate(all="ignore")
    def _judge(self, count: int, r: Array, s: Array, target: Array, due: Array | None, switch: Array | None) -> Array | None:
        """Sets statuses, keeps best points; the rows that continue, if it is time to compact."""
        samples = self.samples
        judged = np.ones(r.shape[0], dtype=bool) if due is None else due
        samples.worst_r = np.where(judged, np.maximum(samples.worst_r, r), samples.worst_r)
        judged = judged if self.idle is None else judged & ~self.idle
        lost, met, spent = ~np.isfinite(r + s), r <= target, samples.evaluations >= self.max_steps
        runaway = met & samples.ran_away(r, s, self.tolerance.atol)
        done = met & ~(lost | runaway)  # inf <= inf is not convergence
        grown = r > GROWTH_LIMIT * samples.best_r
        better = (r < samples.best_r) & ~runaway | np.isinf(samples.best_r)  # at first there is nothing else to return
        leave = (done | lost | grown | spent) & judged
        gone = leave if switch is None else leave | (switch & judged)
        # before a solve that has converged no point can be better
        self._keep_best(r, s, better & judged & ~(leave & done))
        self._finish(leave, r, s, np.where(done, 0, np.where(lost, 3, np.where(grown, 2, 1))))
        if switch is not None and (on := gone & ~leave).any():  # all at once without a copy, unless the buffers are lent
            self.passed_on.append(samples if on.all() and not self.reuses else samples.take(np.flatnonzero(on)))
        self.idle = gone if self.idle is None else self.idle | gone
        idle = int(self.idle.sum())
        # Rows with NaN, or that diverge, leave at once: f should not be evaluated there again.
        ahead = self.schedule.ahead(count, self.idle)
        pays = self.solver.takes_out(self.f, idle / r.shape[0], ahead and ahead + self.waited)
        if idle and (pays or idle == r.shape[0] or (leave & (lost | grown)).any()):
            return np.flatnonzero(~self.idle)
        self.idle = self.idle if idle else None
        return None

    def _spare(self) -> Tensor | None:
        """A buffer for f to write to, if it does."""
        if not self.reuses:
            return None
        if not self.free:
            self.lent.append(take_buffer(self.foreign[1]))
            self.free.append(self.lent[-1])
        return self.free.pop()[: self.samples.z.shape[0]]

    def _release(self, old: Tensor) -> None:
        """Lets f write over an earlier point, unless it is still needed."""
        if not self.reuses or len(self.free) >= ENOUGH_FREE:
            return
        samples = self.samples
        needed = (*self.foreign, samples.z, samples.fz, samples.best_z, samples.best_f, *samples.trail, *self.free)
        if all(old is not other for other in needed):
            self.free.append(old)

    def _keep_best(self, r: Array, s: Array, better: Array) -> None:
        before = self.samples.best_z
        self.samples.keep_best(r, s, better, self.idle)
        self._release(before)

    def _finish(self, leave: Array, r: Array, s: Array, codes: Array) -> None:
        """Writes the results of the samples that leave."""
        if not leave.any():
            return
        samples, out = self.samples, self.outcome
        done = (codes == Status.CONVERGED)[leave]
        whole = done.all() and done.shape[0] == out.value.shape[0]
        if whole and all(samples.z is not other for other in self.foreign):  # all at once: nothing to gather
            out.value, out.at_once = samples.z, True
            out.image = None if out.image is None else samples.fz
        else:
            chosen = np.flatnonzero(leave)
            samples.gather(out.value, chosen, done, samples.z, samples.best_z)
            if out.image is not None and samples.best_f is not None:
                samples.gather(out.image, chosen, done, samples.fz, samples.best_f)
        index, steps, r_, s_ = samples.index[leave], samples.evaluations[leave], r[leave], s[leave]
        rate = (r_ / samples.first_r[leave]) ** (1.0 / np.maximum(steps - 1, 1)).astype(r.dtype)
        if not done.all():
            r_, s_ = np.where(done, r_, samples.best_r[leave]), np.where(done, s_, samples.best_s[leave])
        for column, values in zip(NUMBERS, (r_, s_, steps, codes[leave], rate), strict=True):
            getattr(out, column).numpy()[index] = values

    def _compact(self, kept: Array, point: Point) -> Point:
        """Removes all other rows, everywhere."""
        rows = to_device(kept, self.samples.z.device)
        self.samples = samples = self.samples.take(kept)
        self.f = self.f.take(rows)
        self.state = self.solver.take(self.state, rows)
        if self.rule is not None:
            self.rule.take(rows)
        self.schedule.take(kept)
        self.idle, self.waited = None, 0
        self.free = list(self.lent)  # the remaining rows were copied, so all buffers are free
        if self.plain:
            return point  # a plain step needs nothing of it
        return point.taken(rows, samples)
