"""Closing a solve: only if f of the whole batch confirms an answer, it is CONVERGED.

The loop relies on three facts: rows do not depend on each other, so that a finished one may leave;
f gives the same value at the same point; a solver reports f where it says. All three hold by
construction for the maps and solvers of this package. For any other map or solver one evaluation at
the end of every solve checks them (for an adjoint system the last product, if all converged at it):

- a random map (dropout) draws numbers, or gives another value there: no sample has converged;
- rows that depend on each other give another residual: the solve continues with the batch as one
  sample;
- a solver that reports a wrong f(z) is found in the same way: its samples have not converged.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from wellposed._torch import apart, outer_states, random_state, sequence_number, watched
from wellposed._tree import differs, measure, relative
from wellposed.errors import InvalidArgument
from wellposed.solve._samples import Outcome
from wellposed.solve._whole_batch import CountedMap, Together, WholeBatch, as_batch
from wellposed.solve.loop import iterate
from wellposed.solve.map import AbstractMap, FunctionMap, RowsCoupled
from wellposed.solve.solver import AbstractSolver, Tolerance
from wellposed.solve.splitting import AbstractSplitting
from wellposed.status import Status

#: Evaluations used to find out why samples diverged, if as many are left.
MOST_PROBES = 4
#: Residuals at one point may differ by this many roundings of |f(z)|: products of another batch size add up differently.
SLACK = 8.0
RANDOM = (
    "f is random: it draws random numbers, or gives another value at the same point, so there is no equation to solve. Make "
    "noise such as dropout constant within a solve, or call eval()."
)
UNREPEATED = (
    "f may be random: the state of a random generator changed while f was evaluated, and no evaluation was left to find out "
    "whether f draws random numbers or another thread does. Raise max_steps."
)
UNCONFIRMED = (
    "f of the whole batch, evaluated at the value returned, does not confirm what the samples showed: rows depend on each "
    "other (give coupled=True), an argument of the size of the batch is not one value a sample, f is random, or it is so "
    "steep that it multiplies rounding (large weights: constrain the cell, or train with a smaller step)."
)
COUPLED_HINT = (
    " If rows of the batch depend on each other (attention over the batch, batch statistics, a graph), give coupled=True, or "
    "groups to the call."
)
COUPLED = (
    "Rows of the batch depend on each other, so the batch was solved as one sample: status and residual are those of the whole "
    "batch. Give coupled=True to solve it in this way from the start; if rows should not depend on each other, correct f."
)
COUPLED_GROUPS = (
    "Groups depend on each other, as by an edge between two graphs, so the batch was solved as one sample: status and residual "
    "are those of the whole batch. Correct groups or the edges; if all rows are one graph, give coupled=True and no groups."
)


class Closing:
    """One solve and its confirmation.

    Args:
        f, solver, tolerance, max_steps, record: As for `iterate`.
        trusted: Whether the solver is one of this package.
    """

    def __init__(
        self, f: AbstractMap, solver: AbstractSolver, tolerance: Tolerance, max_steps: int, *, record: bool, trusted: bool
    ) -> None:
        self.f, self.solver, self.tolerance, self.max_steps = f, solver, tolerance, max_steps
        self.record, self.trusted = record, trusted

    def run(self, z: Tensor, first: Tensor | None = None, keep_image: bool = False, graph: bool = False) -> Outcome:
        """Solves as `iterate` does, and confirms: with a `graph` that evaluation is recorded."""
        before, outer = random_state(z.device), outer_states() if graph and self.f.fresh else None
        z = z if self.trusted else z.clone()  # a solver may change what it is given
        first, changed = self._evaluate(z, before) if first is None else (first, False)
        budget = max(self.max_steps - 1 - changed, 1)  # another is left to find out who changed the generator
        around = apart() if graph else nullcontext()  # if not, the caller has done so
        records = graph and self.trusted and isinstance(around, nullcontext)
        options: dict[str, Any] = {"tolerance": self.tolerance, "max_steps": budget, "record": self.record, "graph": records}
        try:
            with around:
                outcome = iterate(self._counting(z), z, self.solver, first=first, keep_image=keep_image, **options)
        except RowsCoupled as found:
            return self._as_one(found.value, self._evaluate(found.value)[0], found.evaluations + 1)
        if self.max_steps == 1:  # a single evaluation is one of the whole batch at the start, which is returned
            if changed:
                not_converged(outcome, outcome.codes >= 0, outcome.g_norm, outcome.f_norm, UNREPEATED)
            return outcome
        if outcome.at_once is not None and self.trusted and (self.f.repeats or outcome.recorded is not None):
            if torch.equal(before, random_state(z.device)) and (outer is None or outer == outer_states()):
                return outcome  # the last evaluation was one of the whole batch at the values that are returned
        measured = (outcome.codes == Status.CONVERGED) | (outcome.codes == Status.MAX_STEPS)
        return self._close(outcome, measured, graph) if bool(measured.any()) else outcome

    def _counting(self, z: Tensor) -> AbstractMap:
        """f, which counts its own evaluations if the solver is not of this package."""
        if self.trusted or any(isinstance(stage, AbstractSplitting) for stage, _ in self.solver.stages()):
            return self.f  # a splitting evaluates the parts of f
        return CountedMap.of(self.f, z.shape[0], z.device)

    def _left(self, outcome: Outcome) -> int:
        """Evaluations that every sample may still take part in."""
        return self.max_steps - int(outcome.steps.max())

    def _close(self, outcome: Outcome, measured: Tensor, graph: bool) -> Outcome:
        """The closing evaluation, at the value that is returned."""
        since, last = sequence_number(), outcome.at_once if self.trusted else None  # which a foreign solver only claims
        outer = None if self.f.repeats or (last is not None and not self.f.fresh) else outer_states()
        with torch.set_grad_enabled(graph):
            fz, changed = self._evaluate(outcome.value, f=self.f.tracked if graph else self.f)
        if graph:
            outcome.recorded, fz = (fz, since), fz.detach()
        changed = changed or (outer is not None and outer_states() != outer)
        changed = changed or (last is not None and bool(differs(fz, last).any()))
        norms = measure(fz - outcome.value, fz)
        r, s = map(torch.from_numpy, norms[:2])
        outcome.steps = outcome.steps + 1
        finite = r + s < torch.inf  # inf <= inf is not convergence
        within = (r <= self.tolerance.target(s)) & finite
        if not (changed or self.record or outcome.codes.any()) and bool(within.all()):
            outcome.g_norm, outcome.f_norm = r, s  # the usual case: every sample is confirmed
            outcome.image = None if outcome.image is None else fz
            return outcome
        note = self._suspect(outcome, fz if last is None else last) if changed else ""
        if note:
            return not_converged(outcome, measured, r, s, note)
        rounding = SLACK * torch.finfo(r.dtype).eps * s
        claimed = outcome.codes == Status.CONVERGED
        near = claimed & finite & (r <= self.tolerance.target(s) + rounding)  # as small as before, up to the rounding of f
        # the best point of samples that diverged or met NaN is checked too: they may have done so only when alone
        here = measured | (r.isfinite() & outcome.g_norm.isfinite())
        same = (r - outcome.g_norm).abs() <= rounding + 1e-3 * r
        wrong = here & ~torch.where(claimed, near, same)
        if r.shape[0] == 1 and not r.isfinite() and bool(wrong):  # no other row can have caused it
            outcome.codes, wrong = torch.full_like(outcome.codes, int(Status.NOT_FINITE)), ~wrong
        # a residual that met the tolerance in a smaller batch was measured too
        new = here & ~(near & ~within)
        outcome.g_norm, outcome.f_norm = torch.where(new, r, outcome.g_norm), torch.where(new, s, outcome.f_norm)
        if bool(wrong.any()):
            return self._explain(outcome, fz, wrong)
        diverged = outcome.codes == Status.DIVERGED
        if bool(diverged.any()) and r.shape[0] > 1 and self._left(outcome) >= MOST_PROBES:
            continued = self._check_diverged(outcome, fz, diverged.nonzero().squeeze(1))
            if continued is not None:
                return continued
        if outcome.image is not None:
            outcome.image = torch.where(claimed.to(fz.device).unsqueeze(1), fz, outcome.image)
        if self.record:
            rows = measured.nonzero().squeeze(1)
            outcome.history.append((rows, outcome.steps[rows], relative(outcome.g_norm, outcome.f_norm)[rows]))
        return outcome

    def _explain(self, outcome: Outcome, fz: Tensor, wrong: Tensor) -> Outcome:
        """Finds out why the whole batch does not confirm its samples, and continues accordingly."""
        z, note = outcome.value, UNCONFIRMED
        if self._left(outcome) >= 1:
            again, drawn = self._repeat(outcome)
            if drawn or bool(differs(again, fz).any()):
                self._distrust()
                return not_converged(outcome, wrong, *_larger(outcome, again, z), RANDOM)
            if z.shape[0] == 1 and not self.trusted:
                note = (
                    f"{type(self.solver).__name__}.step reports an f(z) that f does not give at that z: its Step must hold f "
                    "evaluated at Step.z, and a Point may not be changed."
                )
            elif z.shape[0] > 1:
                if isinstance(self.f, Together) or self._depends_on_others(outcome, fz, int(wrong.nonzero()[0])):
                    return self._as_one(z, fz, int(outcome.steps.max()))
                if self._left(outcome) >= 1:
                    return self._together(outcome, fz)
        return not_converged(outcome, wrong, outcome.g_norm, outcome.f_norm, note)

    def _check_diverged(self, outcome: Outcome, fz: Tensor, rows: Tensor) -> Outcome | None:
        """Samples may have diverged because they were evaluated alone, or because others moved."""
        z, together = outcome.value, isinstance(self.f, Together)
        for part in () if together else (rows[:1], rows[1:]):
            if part.shape[0] == 0:
                continue
            outcome.steps[part] += 1
            part = part.to(z.device)
            try:
                alone = self.f.take(part)(z[part])
            except RowsCoupled:
                return self._as_one(z, fz, int(outcome.steps.max()))
            together = getattr(self.f, "whole_only", False)  # then it was not alone
            if together or bool(differs(alone, fz[part]).any()):
                break
        else:
            if not together:
                return None
        if self._depends_on_others(outcome, fz, int(rows[0])):
            return self._as_one(z, fz, int(outcome.steps.max()))
        return None if together else self._together(outcome, fz)

    def _evaluate(self, z: Tensor, before: Tensor | None = None, f: Callable[[Tensor], Tensor] | None = None) -> Any:
        """f of a copy, and whether the state of torch's generator changed meanwhile, or since."""
        given, before = z.clone(), random_state(z.device) if before is None else before
        with nullcontext() if torch.is_grad_enabled() else apart():
            fz = (f or self.f)(given)
        if not torch.equal(given, z) and not bool(((given == z) | z.isnan()).all()):
            raise InvalidArgument(
                "f changed its argument in place, through its memory or a buffer that it had returned before; it must return a "
                "new value and leave z as it is."
            )
        return fz, not torch.equal(before, random_state(z.device))

    def _repeat(self, outcome: Outcome) -> tuple[Tensor, bool]:
        """f at the value once more, and whether it draws random numbers."""
        outcome.steps, outer = outcome.steps + 1, outer_states()
        again, drawn = watched(self.f, outcome.value.clone())
        return again, drawn or outer_states() != outer

    def _suspect(self, outcome: Outcome, fz: Tensor) -> str:
        """A sentence if f is random; nothing if another thread changed the generator."""
        if self._left(outcome) < 1:
            return UNREPEATED
        again, drawn = self._repeat(outcome)
        if not drawn and not bool(differs(again, fz).any()):
            return ""
        self._distrust()
        return RANDOM

    def _distrust(self) -> None:
        """The next solve looks for draws again."""
        if isinstance(self.f, FunctionMap):
            self.f.costs.clear()

    def _depends_on_others(self, outcome: Outcome, fz: Tensor, row: int) -> bool:
        """Whether f of one row changes when the others move, or are 0, in the steps left."""
        for moved in _others_moved(outcome.value, row):
            if self._left(outcome) < 1:
                break
            outcome.steps = outcome.steps + 1
            try:
                value = self.f(moved)
            except Exception:  # f need not be defined there
                continue
            if bool(differs(value[row : row + 1], fz[row : row + 1]).any()):
                return True
        return False

    def _continued(self, f: AbstractMap, spent: int) -> Closing:
        """The rest of the solve with another map; its first evaluation is the last one so far."""
        left = max(self.max_steps - spent + 1, 1)
        return Closing(f, self.solver, self.tolerance, left, record=self.record, trusted=self.trusted)

    def _together(self, outcome: Outcome, fz: Tensor) -> Outcome:
        """Continues with all samples in every evaluation: f of some rows is not some rows of f."""
        spent = int(outcome.steps.max())
        closing = self._continued(Together(self.f, outcome.value, fz), spent)
        return _count(closing.run(outcome.value, fz), spent - 1, outcome.history)

    def _as_one(self, z: Tensor, fz: Tensor, spent: int) -> Outcome:
        """Continues with the batch as one sample."""
        f = self.f.inner if isinstance(self.f, Together) else self.f
        closing = self._continued(WholeBatch(f, z.shape), spent)
        with apart():
            outcome = _count(closing.run(z.reshape(1, -1), fz.reshape(1, -1)), spent - 1, [])
        outcome.coupled = not outcome.note or outcome.note == UNCONFIRMED  # else f is random, or the solver wrong
        outcome.note = outcome.note or (COUPLED_GROUPS if f.regroups else COUPLED)
        return as_batch(outcome, z.shape)


def _others_moved(z: Tensor, row: int) -> tuple[Tensor, Tensor]:
    """z with all rows but one moved, and with them set to 0."""
    others = (torch.arange(z.shape[0], device=z.device) != row).unsqueeze(1)
    scale = z.abs().nan_to_num(0.0, 0.0, 0.0).amax().clamp_min(torch.finfo(z.dtype).tiny)
    signs = torch.cos(torch.arange(z.numel(), dtype=z.dtype, device=z.device) ** 2).reshape(z.shape)
    return torch.where(others, z + 0.5 * scale * signs, z), torch.where(others, 0.0, z)


def _count(outcome: Outcome, spent: int, before: list[tuple[Tensor, Tensor, Tensor]]) -> Outcome:
    """The outcome of a continued solve, with the evaluations and the history before it."""
    outcome.steps = outcome.steps + spent
    outcome.history = [*before, *((rows, evaluations + spent, r) for rows, evaluations, r in outcome.history)]
    return outcome


def not_converged(outcome: Outcome, rows: Tensor, r: Tensor, s: Tensor, note: str) -> Outcome:
    """Some samples have not converged, with these |f(z) - z| and |f(z)|; all, if f is random."""
    rows = torch.ones_like(rows) if note in (RANDOM, UNREPEATED) else rows
    outcome.codes = torch.where(rows & (outcome.codes == Status.CONVERGED), int(Status.MAX_STEPS), outcome.codes)
    outcome.g_norm, outcome.f_norm = torch.where(rows, r, outcome.g_norm), torch.where(rows, s, outcome.f_norm)
    outcome.note = note
    return outcome


def _larger(outcome: Outcome, fz: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """The larger of two residuals of a random f."""
    r, s = map(torch.from_numpy, measure(fz - z, fz)[:2])
    larger = ~(relative(r, s) <= relative(outcome.g_norm, outcome.f_norm))
    return torch.where(larger, r, outcome.g_norm), torch.where(larger, s, outcome.f_norm)
