"""The loop: runs a solver until every sample has its status. Start reading here.

A sample leaves, with its status, when its residual meets the tolerance, is not finite or has grown
too much, or its budget is used up. Residuals are measured where they decide (`ResidualSchedule`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wellposed._tree import Array, measure, smallest_norm, take_buffer, to_device, to_host
from wellposed.solve._led_away import GROWTH_LIMIT, leave_plain_steps_out, return_to_best, went_astray
from wellposed.solve._samples import FEW_STEPS, JUDGED_AT, ActiveSamples, Outcome, ResidualSchedule
from wellposed.solve._whole_batch import CountedMap, check_step
from wellposed.solve.map import AbstractMap, RowsCoupled
from wellposed.solve.solver import AbstractSolver, AbstractSwitchingRule, LastStep, Point, Tolerance, Workspace, is_built_in
from wellposed.status import Status

TRAIL, LONG = 3, 8  #: Points kept for the next solver; steps with finished rows after which taking them out is asked.


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
    graph: bool = False,
) -> Outcome:
    """Solves z = f(z) for every row.

    Args:
        f, z, solver: The map, the (batch, features) start, which is not written to, and the method.
        tolerance, max_steps: When a sample is done, and how often it is evaluated at most (>= 1).
        first: f(z), if it is known already; it still counts as an evaluation.
        record, keep_image: Whether to keep the residuals of every step, and f at the value.
        graph: Whether to record the evaluation of the whole batch that is likely to be the last.
    """
    outcome, batch = Outcome(z, image=z if keep_image else None, plain_factor=np.full(z.shape[0], np.nan)), z.shape[0]
    if batch == 0:
        return outcome.allocated()
    passed_on = [ActiveSamples.at_start(z, f(z) if first is None else first, keep_image)]
    aside, stages = None, solver.stages()  # samples that the last stage solves
    if f.is_affine and f.plain_factor is not None and np.isinf(f.plain_factor).any():
        aside, stages = leave_plain_steps_out(f, passed_on[0], outcome, stages, max_steps)
    for stage, rule in stages:
        if rule is None and aside is not None:
            passed_on, aside = [*passed_on, aside], None
        if passed_on:
            samples = ActiveSamples.cat(passed_on)
            part = f.take(to_device(samples.index, z.device)) if samples.index.shape[0] < batch else f
            passed_on = _Stage(part, samples, stage, rule, tolerance, max_steps, outcome, record, graph, aside).run()
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
        graph: bool,
        aside: ActiveSamples | None,
    ) -> None:
        self.f, self.samples, self.solver, self.rule = f, samples, solver, rule
        self.tolerance, self.max_steps, self.outcome, self.record = tolerance, max_steps, outcome, record
        self.held: tuple[Array, Tensor] | None = None  # (rows,) done and judged at the next measurement, and their points
        self.ended, self.waited, self.state = False, 0, None  # and steps taken with idle rows in the batch
        self.aside, idle = aside, None if aside is None else np.isin(samples.index, aside.index)
        self.idle = None if idle is None or not idle.any() else idle  # (rows,) left already, not yet compacted away
        self.passed_on: list[ActiveSamples] = []
        self.workspace = Workspace(f.writes_out and solver.uses_spare, (samples.z, samples.fz))
        self.plain = solver.is_plain and is_built_in(solver)
        few = FEW_STEPS if rule is None else -1.0 if rule.judges_all(f.cost, f.is_affine) else rule.few
        at, first = JUDGED_AT if rule is None else rule.judged_at, 1 if self.plain else 3 if solver.skips else 0
        self.plain_only = self.plain and (rule is None or rule.uses_trail)  # no other solver has had these samples
        self.returns = f.is_affine and self.plain_only and rule is not None
        factor = None if f.plain_factor is None or not self.plain_only else f.plain_factor[samples.index]
        stride, far = (rule.stride, min(at)) if self.plain and rule is not None and f.strides else (1, first)
        self.schedule = ResidualSchedule(samples.z.shape[0], first=first, far=far, few=few, stride=stride, at=at, factor=factor)
        whole = samples.z.shape[0] == outcome.value.shape[0] and self.idle is None and not f.built_in and (f.repeats or graph)
        confirms = whole and (self.plain or solver.confirms) and is_built_in(solver)
        self.last = LastStep(f, graph, outcome, self.schedule) if confirms else None

    def run(self) -> list[ActiveSamples]:
        """Returns the samples for the next stage."""
        differences = take_buffer(self.samples.fz)
        try:
            self._loop(differences)
        except RowsCoupled as found:
            value = self.outcome.allocated().value.clone()  # with the points of samples that have not left: the start as one
            for part in (self.samples, *self.passed_on, *([] if self.aside is None else [self.aside])):
                value[to_device(part.index, part.z.device)] = part.z
            found.evaluations, found.value = min(self.samples.most(self.idle) + found.within + 1, self.max_steps), value
            raise
        self.workspace.give_back(differences, unless=(self.outcome.value, self.outcome.image))
        return self.passed_on

    def _loop(self, differences: Tensor) -> None:
        count, solver = 0, self.solver
        point: Any = None
        while True:
            if count or not self._starts_at_zero():
                point = self._look(count, differences)
                if self.ended:
                    return
            samples = self.samples
            if count == 0:
                self.state, samples.trail = solver.init(self.f, point), ()
            ahead = self.max_steps - samples.most(self.idle)
            ahead = 1 if self.record else min(ahead, self.schedule.next_due(count + 1, self.idle) - count)
            count += ahead if self.plain or solver.skips else 1
            more: Any = ahead if self.held is None else ahead - (ahead - 1) * self.held[0]
            if self.plain:
                point = None  # would keep the memory of its tensors
                self._plain_steps(count - ahead, ahead)
            else:
                point.trail, point.skip = (), ahead - 1 if solver.skips else 0  # the solver has what it needs of the trail
                point.spare = self.workspace.spare(point.z.shape[0])
                point.evaluate = None if self.last is None else partial(self.last, count, self.idle, self.held)
                step = solver.step(self.state, self.f, point)
                if not is_built_in(solver):
                    check_step(solver, step, point, counted=isinstance(self.f, CountedMap))
                samples.z, samples.fz, samples.ahead, more = step.z, step.fz, None, step.evaluations
                self.workspace.release(point.z, samples.tensors())
            self.held, self.waited = None, self.waited + (0 if self.idle is None else ahead)
            if isinstance(more, Tensor):  # not one evaluation of the whole batch
                self.last, more = None, to_host(more)
            samples.evaluations = to_host(self.f.after_step()) if isinstance(self.f, CountedMap) else samples.evaluations + more

    def _starts_at_zero(self) -> bool:
        """Measures a start of one zero for all entries, where g is f(z), if no sample is done."""
        samples = self.samples
        if not self.plain_only or self.record or any(samples.z.stride()) or bool(samples.z[0, :1].any()):
            return False
        target = self.tolerance.target(r := to_host(torch.linalg.vector_norm(samples.fz, dim=1)))
        if not (r.min() > smallest_norm(samples.fz.dtype) and r.max() < np.inf and (r > target).all() and self.max_steps > 1):
            return False
        samples.keep_first(r, r)
        samples.worst_r = samples.best_r = samples.best_s = r
        self.schedule.update(0, r, target, None)
        return True

    def _look(self, count: int, differences: Tensor) -> Point | None:
        """Measures all samples, and judges those that are due; the point for the next step."""
        samples, rule, plain, atol, point, astray = self.samples, self.rule, self.plain, self.tolerance.atol, None, None
        g = torch.sub(samples.fz, samples.z, out=differences[: samples.z.shape[0]])
        r, s, ordinary = measure(g, samples.fz)
        target = self.tolerance.target(s)
        left = samples.most(self.idle) < self.max_steps
        due = self.schedule.due(count) if left else None
        asked = rule is not None and (not rule.uses_trail or self.schedule.judges(count))
        if count == 0:
            samples.keep_first(r, s)
        if self.returns and not (r < samples.first_r).all():
            astray = went_astray(samples, r, self.schedule.foretold(), due, self.idle, self.max_steps)
            r, s, target = return_to_best(self.f, samples, astray, r, s, self.tolerance)
        if asked or not plain:
            point = Point.measured(samples, g, r, target, self.max_steps, due=self.schedule.slow if plain else None)
        if self.record:
            self.outcome.add_to_history(samples, r, s, self.idle)
        switch = rule.decide(count, point) if asked and rule is not None and point is not None else None
        switch = astray if switch is None or not switch.any() else np.asarray(switch) | (False if astray is None else astray)
        calm = ordinary and switch is None
        if calm and self.idle is None and due is None and (r <= target).all() and not samples.ran_away(r, s, atol).any():
            self._finish(np.ones(r.shape[0], dtype=bool), r, s, np.zeros(r.shape[0], dtype=np.int64))
            self.ended = True  # all at once, as most stages end
            return None
        self.schedule.update(count, r, target, due)
        above = r > target if self.idle is None else (r > target) | self.idle
        if calm and left and self.waited < LONG and above.all() and r.max() < GROWTH_LIMIT * samples.best_r.min():
            judged = True if due is None else due  # the usual case: no sample has come to an end
            samples.worst_r = np.where(judged, np.maximum(samples.worst_r, r), samples.worst_r)
            self._keep_best(r, s, (r < samples.best_r) & judged & (True if self.idle is None else ~self.idle), self.idle)
            return point
        if calm and due is not None and not samples.ran_away(r, s, atol).any() and self._holds(count, due & (r <= target)):
            return point
        kept = self._judge(count, r, s, target, due, switch)
        self.ended = kept is not None and kept.shape[0] == 0
        return point if kept is None or self.ended else self._compact(kept, point)

    def _holds(self, count: int, done: Array) -> bool:
        """Whether samples that are done stand still, and are judged with the others later."""
        stride = 0 if self.last is None or self.record or self.idle is not None else self.schedule.one_more(count, done)
        self.held = (done, self.samples.z) if 0 < stride < self.max_steps - self.samples.most(None) else None
        return self.held is not None

    def _plain_steps(self, count: int, steps: int) -> None:
        """Takes plain steps without a measurement; keeps the points before a judgement."""
        samples, rule, f, workspace = self.samples, self.rule, self.f, self.workspace
        for taken in range(count + 1, count + steps + 1):  # the count alone decides: none switches because another is slow
            keep = rule is not None and rule.keeps(taken)
            old, point = samples.z, samples.fz
            if samples.ahead is not None and not bool(samples.ahead[:, :1].isnan().any()):
                fz = samples.ahead
            elif taken == count + steps and self.last is not None:
                point, fz = self.last(taken, self.idle, self.held, point)
            else:  # what is kept cannot be written over
                fz = f(point, out=workspace.spare(old.shape[0]) if workspace.used and not keep else None)
            samples.z, samples.fz, samples.ahead = point, fz, None
            samples.trail = (*samples.trail[1 - TRAIL :], old) if keep else ()
            if workspace.used and not keep:
                workspace.release(old, samples.tensors())

    @np.errstate(all="ignore")
    def _judge(self, count: int, r: Array, s: Array, target: Array, due: Array | None, switch: Array | None) -> Array | None:
        """Sets statuses, keeps best points; the rows that continue, if it is time to compact."""
        samples = self.samples
        judged = np.ones(r.shape[0], dtype=bool) if due is None else due
        samples.worst_r = np.where(judged, np.maximum(samples.worst_r, r), samples.worst_r)
        judged = judged if self.idle is None else judged & ~self.idle
        lost, spent = ~np.isfinite(r + s), samples.evaluations >= self.max_steps
        met = (r <= target) & ~lost  # inf <= inf is not convergence
        runaway = met & samples.ran_away(r, s, self.tolerance.atol)
        done = met & ~runaway
        grown = r > GROWTH_LIMIT * samples.best_r
        better = (r < samples.best_r) & ~runaway | np.isinf(samples.best_r)  # at first there is nothing else to return
        leave = (done | lost | grown | spent) & judged
        gone = leave if switch is None else leave | (switch & judged)
        answered = leave & done  # no point is better than an answer
        self._keep_best(r, s, better & judged & ~answered, answered if self.idle is None else answered | self.idle)
        self._finish(leave, r, s, np.where(done, 0, np.where(lost, 3, np.where(grown, 2, 1))))
        if switch is not None and (on := gone & ~leave).any():  # all at once without a copy, unless the buffers are lent
            self.outcome.plain_factor[samples.index[away := on & self.plain & (r >= samples.first_r)]] = np.inf  # led away
            if away.any() and self.f.is_affine and samples.z.shape == (start := self.workspace.foreign)[0].shape:
                back = to_device(away, samples.z.device).unsqueeze(1)
                samples.z, samples.fz = torch.where(back, start[0], samples.z), torch.where(back, start[1], samples.fz)
            self.passed_on.append(samples if on.all() and not self.workspace.used else samples.take(np.flatnonzero(on)))
            self.last = None  # they have no answer yet
        before, self.idle = self.idle, gone if self.idle is None else self.idle | gone
        idle, out, last = int(self.idle.sum()), self.outcome, self.last
        if last is not None and before is not None and idle == r.shape[0] and met.all() and not to_host(out.codes).any():
            out.at_once, out.recorded = samples.fz, last.recorded  # it was at the values of all samples
            to_host(out.steps)[before] += last.recorded is not None or self.f.repeats  # else another one confirms, and counts
        ahead = self.schedule.ahead(count, self.idle) if self.plain or self.solver.steps_once else 0
        pays = self.solver.takes_out(self.f, idle / r.shape[0], ahead and ahead + self.waited)
        if idle and (pays or idle == r.shape[0] or (leave & (lost | grown)).any()):  # no f at NaN, or far away, again
            return np.flatnonzero(~self.idle)
        self.idle = self.idle if idle else None
        return None

    def _keep_best(self, r: Array, s: Array, better: Array, left: Array | None) -> None:
        before = self.samples.best_z
        self.samples.keep_best(r, s, better, left)
        self.workspace.release(before, self.samples.tensors())

    def _finish(self, leave: Array, r: Array, s: Array, codes: Array) -> None:
        """Writes the results of the samples that leave."""
        if not leave.any():
            return
        samples, out = self.samples, self.outcome
        done, steps, r_, s_ = (codes == Status.CONVERGED)[leave], samples.evaluations[leave], r[leave], s[leave]
        best = np.where(done, r_, samples.best_r[leave])  # |g| is below that of the best point only where |f| ran away
        rate = (np.maximum(r_, best) / samples.first_r[leave]) ** (1.0 / np.maximum(steps - 1, 1)).astype(r.dtype)
        if not done.all():
            r_, s_ = best, np.where(done, s_, samples.best_s[leave])
        numbers = (r_, s_, steps, codes[leave], rate)
        if self.plain_only:
            out.plain_factor[samples.index[leave]] = rate
        own = done.all() and all(samples.z is not other for other in self.workspace.foreign)
        if own and done.shape[0] == out.value.shape[0]:  # all at once: nothing to gather
            out.value, out.at_once, out.recorded = samples.z, samples.fz, None if self.last is None else self.last.recorded
            out.image = None if out.image is None else samples.fz
            out.write(None, *numbers)
            return
        out.allocated().write(samples.index[leave], *numbers)
        if own and self.last is not None and out.image is None and not self.workspace.used:
            out.value, out.lent = samples.z, True  # `LastStep` has put the earlier answers there: nothing to gather yet
            return
        out.value, out.lent = out.value.clone() if out.lent else out.value, False
        samples.gather(out.value, chosen := np.flatnonzero(leave), done, samples.z, samples.best_z)
        if out.image is not None and samples.best_f is not None:
            samples.gather(out.image, chosen, done, samples.fz, samples.best_f)

    def _compact(self, kept: Array, point: Point | None) -> Point | None:
        """Removes all other rows, everywhere."""
        rows, samples = to_device(kept, self.samples.z.device), self.samples.take(kept)
        self.f, self.state = self.f.take(rows), self.solver.take(self.state, rows)
        if self.rule is not None:
            self.rule.take(rows)
        self.schedule.take(kept)
        self.samples, self.idle, self.waited, self.last = samples, None, 0, None
        self.workspace.free = list(self.workspace.lent)  # the remaining rows were copied
        return None if point is None or self.plain else point.taken(rows, samples)
