"""The loop: runs a solver until every sample has its status. Start reading here.

A sample leaves the loop, with its own status and its own count of evaluations, when its residual
meets the tolerance, is not finite, has grown too much, or its budget is used up; the remaining rows
are compacted. The loop does not depend on what the map is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wellposed.errors import InvalidType
from wellposed.solve._samples import (
    ActiveSamples,
    Outcome,
    ResidualSchedule,
    give_buffer,
    relative,
    smallest_norm,
    take_buffer,
)
from wellposed.solve.map import AbstractMap, RowsCoupled
from wellposed.solve.solver import AbstractSolver, AbstractSwitchingRule, Point, Step, Tolerance
from wellposed.status import Status

#: A residual this many times the least one seen is divergence: in float32 no digit of the start is left.
GROWTH_LIMIT = 1e8
#: Beyond this many times its first value, |f(z)| alone may not make a relative residual small.
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
        solver: The method.
        tolerance: When a sample is done.
        max_steps: Evaluations of f that each sample may take part in, at least 1.
        first: f(z), if it is known already; it still counts as an evaluation.
        record: Whether to keep the residual of every sample at every step.
        keep_image: Whether to return f at the value as well.
    """
    outcome = Outcome.like(z, keep_image)
    batch = z.shape[0]
    if batch == 0:
        return outcome
    samples = ActiveSamples.at_start(z, f(z) if first is None else first, keep_image)
    part = f
    for stage, rule in solver.stages():
        passed_on = _Stage(part, samples, stage, rule, tolerance, max_steps, outcome).run(record)
        if not passed_on:
            break
        samples = ActiveSamples.cat(passed_on)
        part = f.take(samples.index) if samples.index.shape[0] < batch else f
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
    ) -> None:
        self.f, self.samples, self.solver, self.rule = f, samples, solver, rule
        self.tolerance, self.max_steps, self.outcome = tolerance, max_steps, outcome
        self.idle: Tensor | None = None  # (rows,) left already, not yet compacted away
        self.foreign = (samples.z, samples.fz)  # may belong to the caller: their memory must not be reused
        self.most = int(samples.evaluations.max())  # the largest number of evaluations
        self.small = smallest_norm(samples.z.dtype)
        self.passed_on: list[ActiveSamples] = []
        self.state: Any = None
        self.reuses = f.writes_out and solver.uses_spare
        self.lent: list[Tensor] = []  # buffers of the workspace, full size
        self.free: list[Tensor] = []  # those, and other tensors of at least as many rows, without a reader
        ahead = f.steady and (solver.is_plain or solver.skips)
        self.schedule = ResidualSchedule(samples.z.shape[0], samples.z.device, ahead=ahead)

    def run(self, record: bool) -> list[ActiveSamples]:
        """Returns the samples for the next stage."""
        differences = take_buffer(self.samples.fz)
        try:
            self._loop(record, differences)
        except RowsCoupled as found:
            # from the points of the samples that have not left, the batch is solved as one sample
            for part in (self.samples, *self.passed_on):
                self.outcome.value[part.index] = part.z
            found.evaluations, found.value = self.most + 1, self.outcome.value
            raise
        returned = {out.data_ptr() for out in (self.outcome.value, self.outcome.image) if out is not None}
        for buffer in (differences, *self.lent):
            if buffer.data_ptr() not in returned:
                give_buffer(buffer)
        return self.passed_on

    def _loop(self, record: bool, differences: Tensor) -> None:
        count = 0
        while True:
            samples = self.samples
            g = torch.sub(samples.fz, samples.z, out=differences[: samples.z.shape[0]])
            r = torch.linalg.vector_norm(g, dim=1)
            s = torch.linalg.vector_norm(samples.fz, dim=1)
            target = self.tolerance.target(s)
            point = Point(samples.z, samples.fz, g, r, target, samples.evaluations, self.max_steps)
            if record:
                point.measure_extremes(s, self.tolerance)
                active = slice(None) if self.idle is None else ~self.idle
                residual = relative(r, s)[active]
                self.outcome.history.append((samples.index[active], samples.evaluations[active], residual))
            switch = None if self.rule is None else self.rule.decide(count, point)
            switch = switch if switch is not None and bool(switch.any()) else None
            # The usual case in as few operations as possible: no sample has come to an end.
            due = self.schedule.due(count) if self.most < self.max_steps else None
            onward = (r > target.clamp_min(self.small)) & (r < GROWTH_LIMIT * samples.best_r)
            for others in (self.idle, None if due is None else ~due):
                onward = onward if others is None else onward | others
            self.schedule.update(count, r, target, due)
            if switch is None and self.most < self.max_steps and bool(onward.all()):
                samples.keep_worst(r, due)
                if count == 0:
                    samples.keep_first(r, s)
                if due is None:
                    self._keep_best(r, s, r < samples.best_r)
            else:
                kept = self._sort_out(point, s, switch, due)
                if kept is not None:
                    if kept.shape[0] == 0:
                        return
                    point = self._compact(kept, point)
                    samples = self.samples
            if count == 0:
                self.state = self.solver.init(self.f, point)
            point.spare = self._spare()
            unobserved = not record and (self.rule is None or not self.rule.needs_next_step)
            if unobserved and self.solver.skips:
                ahead = self.schedule.next_due(count + 1, self.idle) - count
                point.skip = max(min(ahead, self.max_steps - self.most) - 1, 0)
            step = self.solver.step(self.state, self.f, point)
            if not isinstance(step, Step):
                raise InvalidType(
                    f"{type(self.solver).__name__}.step must return a Step(z, fz), the next point and f at it; "
                    f"got {type(step).__name__}."
                )
            count += 1 + point.skip
            samples.z, samples.fz = step.z, step.fz
            self._release(point.z)
            samples.evaluations = samples.evaluations + step.evaluations
            self.most = self.most + step.evaluations if isinstance(step.evaluations, int) else int(samples.evaluations.max())
            if unobserved and self.solver.is_plain:
                count += self._plain_steps(self.schedule.next_due(count, self.idle) - count)

    def _plain_steps(self, steps: int) -> int:
        """Takes plain steps without a measurement, within the budget; returns how many."""
        steps = min(steps, self.max_steps - self.most)
        if steps <= 0:
            return 0
        samples = self.samples
        for _ in range(steps):
            old, spare = samples.z, self._spare()
            samples.z, samples.fz = samples.fz, self.f(samples.fz, out=spare)
            self._release(old)
        samples.evaluations = samples.evaluations + steps
        self.most += steps
        return steps

    def _sort_out(self, point: Point, s: Tensor, switch: Tensor | None, due: Tensor | None) -> Tensor | None:
        """Sets statuses, keeps best points; the rows that continue, if it is time to compact."""
        samples, r = self.samples, point.r
        point.measure_extremes(s, self.tolerance)
        lost = ~(r.isfinite() & s.isfinite())
        samples.keep_worst(r, due)
        samples.keep_first(r, s)
        met = r <= point.target
        runaway = met & self._ran_away(r, s)
        done = met & ~(lost | runaway)  # inf <= inf is not convergence
        grown = r > GROWTH_LIMIT * samples.best_r
        better = (r < samples.best_r) & ~runaway
        better |= samples.best_r.isinf()  # at the first point there is nothing else to return
        if due is None:
            self._keep_best(r, s, better)
        leave = done | lost | grown | (samples.evaluations >= self.max_steps)
        leave = leave if due is None else leave & due
        away = leave if switch is None else leave | switch
        if self.idle is not None:
            leave, away = leave & ~self.idle, away & ~self.idle
        self._finish(leave, point, s, torch.where(done, 0, torch.where(lost, 3, torch.where(grown, 2, 1))))
        passed_on = (away & ~leave).nonzero().squeeze(1)
        if passed_on.shape[0]:
            self.passed_on.append(samples.take(passed_on))
        self.idle = away if self.idle is None else self.idle | away
        idle = int(self.idle.sum())
        if idle == 0:
            self.idle = None
            return None
        # Rows with NaN, or that diverge, leave at once: f should not be evaluated there again.
        if idle >= self.solver.idle_part * r.shape[0] or bool((leave & (lost | grown)).any()):
            return (~self.idle).nonzero().squeeze(1)
        return None

    def _ran_away(self, r: Tensor, s: Tensor) -> Tensor:
        """(rows,) where |f(z) - z| is small relative to |f(z)| only because that grew.

        The residual of f(z) = z + tanh(x - z) is at most 1, so at z = 1e9 any rtol is met, and at
        1e16 it rounds to 0. Wherever |f(z)| has grown much, |f(z) - z| itself must have fallen, to
        half of the largest seen and beyond rounding.
        """
        fallen = r + 8 * torch.finfo(r.dtype).eps * s <= 0.5 * self.samples.worst_r
        away = (s > RUNAWAY_LIMIT * self.samples.first_s) & ~fallen
        return away & (r > self.tolerance.atol) if self.tolerance.atol > 0 else away

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
        needed = (*self.foreign, samples.z, samples.fz, samples.best_z, samples.best_f, *self.free)
        if all(old is not other for other in needed):
            self.free.append(old)

    def _keep_best(self, r: Tensor, s: Tensor, better: Tensor) -> None:
        before = self.samples.best_z
        self.samples.keep_best(r, s, better, self.idle)
        self._release(before)

    def _finish(self, leave: Tensor, point: Point, s: Tensor, codes: Tensor) -> None:
        """Writes the results of the samples that leave."""
        samples, out = self.samples, self.outcome
        chosen = leave.nonzero().squeeze(1)
        if chosen.shape[0] == 0:
            return
        done = codes == Status.CONVERGED
        whole = chosen.shape[0] == out.value.shape[0] and bool(done.all())
        if whole and all(point.z is not other for other in self.foreign):  # all at once: nothing to gather
            out.value = point.z
            out.image = None if out.image is None else point.fz
        else:
            self._gather(out.value, chosen, done, point.z, samples.best_z)
            if out.image is not None and samples.best_f is not None:
                self._gather(out.image, chosen, done, point.fz, samples.best_f)
        index, steps = samples.index[chosen], samples.evaluations
        rate = (point.r / samples.first_r) ** (steps - 1).clamp_min(1).to(point.r.dtype).reciprocal()
        out.g_norm[index] = torch.where(done, point.r, samples.best_r)[chosen]
        out.f_norm[index] = torch.where(done, s, samples.best_s)[chosen]
        out.steps[index], out.codes[index], out.rate[index] = steps[chosen], codes[chosen], rate[chosen]

    def _gather(self, target: Tensor, chosen: Tensor, done: Tensor, present: Tensor, best: Tensor) -> None:
        """Writes values of chosen rows: the present point if it converged, else the best."""
        part = present.index_select(0, chosen)  # twice as fast as present[chosen]
        converged = done[chosen]
        if best is not present and not bool(converged.all()):
            part = torch.where(converged.unsqueeze(1), part, best.index_select(0, chosen))
        target.index_copy_(0, self.samples.index[chosen], part)

    def _compact(self, kept: Tensor, point: Point) -> Point:
        """Removes all other rows, everywhere."""
        self.samples = samples = self.samples.take(kept)
        self.f = self.f.take(kept)
        self.state = self.solver.take(self.state, kept)
        if self.rule is not None:
            self.rule.take(kept)
        self.schedule.take(kept)
        self.idle = None
        self.free = list(self.lent)  # the remaining rows were copied, so all buffers are free
        self.most = int(samples.evaluations.max())
        g, r, target = point.g.index_select(0, kept), point.r[kept], point.target[kept]
        return Point(samples.z, samples.fz, g, r, target, samples.evaluations, self.max_steps)
