"""Closing a solve: only if f of the whole batch confirms an answer, it is CONVERGED.

The loop relies on three facts: rows do not depend on each other, so that a finished one may leave;
f gives the same value at the same point; a solver reports f where it says. All three hold by
construction for the maps and solvers of this package. For any other map or solver one evaluation at
the end of every solve checks them:

- a random map (dropout) gives another value there: no sample has converged;
- rows that depend on each other give another residual: the solve continues with the batch as one
  sample;
- a solver that reports a wrong f(z) is found in the same way: its samples have not converged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wellposed.solve._samples import Outcome, differs, relative, scaled_norm
from wellposed.solve._whole_batch import Together, WholeBatch
from wellposed.solve.loop import iterate
from wellposed.solve.map import AbstractMap, RowsCoupled
from wellposed.solve.solver import AbstractSolver, Picard, Tolerance
from wellposed.status import Status

#: Evaluations used to find out why samples diverged, if as many are left.
MOST_PROBES = 4
#: Residuals at one point may differ by this many roundings of |f(z)|: products of another batch size
#: add up in another order.
SLACK = 8.0
RANDOM = (
    "f is random: it draws random numbers, or gives another value at the same point, so there is no equation to solve. Make "
    "noise such as dropout constant within a solve, or call eval()."
)
UNCONFIRMED = (
    "f of the whole batch, evaluated at the value returned, does not confirm what the samples showed: rows depend on each "
    "other (give coupled=True), an argument of the size of the batch is not one value a sample, or f is random."
)
COUPLED = (
    "Rows of the batch depend on each other, so the batch was solved as one sample: status and residual are those of the whole "
    "batch. Give coupled=True to solve it in this way from the start; if rows should not depend on each other, correct f."
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

    def run(self, z: Tensor, first: Tensor | None = None, keep_image: bool = False) -> Outcome:
        """Solves from z as `iterate` does; one evaluation of the budget is left for the end."""
        budget = max(self.max_steps - 1, 1)
        options: dict[str, Any] = {"tolerance": self.tolerance, "max_steps": budget, "record": self.record}
        try:
            outcome = iterate(self.f, z, self.solver, first=first, keep_image=keep_image, **options)
        except RowsCoupled as found:
            return self._as_one(found.value, self.f(found.value), found.evaluations + 1)
        measured = (outcome.codes == Status.CONVERGED) | (outcome.codes == Status.MAX_STEPS)
        if self.max_steps == 1 or not bool(measured.any()):
            return outcome  # a single evaluation is one of the whole batch at the start, which is returned
        return self._close(outcome, measured)

    def _close(self, outcome: Outcome, measured: Tensor) -> Outcome:
        """The closing evaluation, at the value that is returned."""
        fz, draws = self._evaluate(outcome.value)
        r, s = scaled_norm(fz - outcome.value), scaled_norm(fz)
        outcome.steps = outcome.steps + measured.to(outcome.steps.dtype)
        if draws:
            return _not_converged(outcome, measured, r, s, RANDOM)
        rounding = SLACK * torch.finfo(r.dtype).eps * s
        claimed = outcome.codes == Status.CONVERGED
        met = r <= self.tolerance.target(s)
        near = claimed & (r <= self.tolerance.target(s) + rounding)  # as small as before, up to the rounding of f
        # the best point of samples that diverged or met NaN is checked too: they may have done so only when alone
        here = measured | (r.isfinite() & outcome.g_norm.isfinite())
        same = (r - outcome.g_norm).abs() <= rounding + 1e-3 * r
        wrong = here & ~torch.where(claimed, near, same)
        # a residual that met the tolerance in a smaller batch was measured too
        new = here & ~(near & ~met)
        outcome.g_norm, outcome.f_norm = torch.where(new, r, outcome.g_norm), torch.where(new, s, outcome.f_norm)
        if bool(wrong.any()):
            return self._explain(outcome, fz, wrong)
        diverged = outcome.codes == Status.DIVERGED
        if bool(diverged.any()) and r.shape[0] > 1 and self.max_steps - int(outcome.steps.max()) >= MOST_PROBES:
            continued = self._check_diverged(outcome, fz, diverged.nonzero().squeeze(1))
            if continued is not None:
                return continued
        if outcome.image is not None:
            outcome.image = torch.where(claimed.unsqueeze(1), fz, outcome.image)
        if self.record:
            rows = measured.nonzero().squeeze(1)
            outcome.history.append((rows, outcome.steps[rows], relative(outcome.g_norm, outcome.f_norm)[rows]))
        return outcome

    def _explain(self, outcome: Outcome, fz: Tensor, wrong: Tensor) -> Outcome:
        """Finds out why the whole batch does not confirm its samples, and continues accordingly."""
        z, spent = outcome.value, int(outcome.steps.max())
        note = UNCONFIRMED
        if self.max_steps - spent >= 2:
            again, draws = self._evaluate(z)
            if draws or bool(differs(again, fz).any()):
                return _not_converged(outcome, wrong, *_larger(outcome, again, z), RANDOM)
            if z.shape[0] == 1 and not self.trusted:
                note = (
                    f"{type(self.solver).__name__}.step reports an f(z) that f does not give at that z: its Step must hold f "
                    "evaluated at Step.z."
                )
            elif z.shape[0] > 1:
                if isinstance(self.f, Together) or self._depends_on_others(z, fz, int(wrong.nonzero()[0])):
                    return self._as_one(z, fz, spent)
                return self._together(outcome, fz, spent)
        return _not_converged(outcome, wrong, outcome.g_norm, outcome.f_norm, note)

    def _check_diverged(self, outcome: Outcome, fz: Tensor, rows: Tensor) -> Outcome | None:
        """Samples may have diverged because they were evaluated alone, or because others moved."""
        z, spent = outcome.value, int(outcome.steps.max())
        if self._depends_on_others(z, fz, int(rows[0])):
            return self._as_one(z, fz, spent)
        if not isinstance(self.f, Together):
            try:
                alone = self.f.take(rows)(z[rows])
            except RowsCoupled:
                return self._as_one(z, fz, spent)
            if bool(differs(alone, fz[rows]).any()):
                return self._together(outcome, fz, spent)
        return None

    def _evaluate(self, z: Tensor) -> tuple[Tensor, bool]:
        """f, and whether it drew random numbers of torch."""
        before = _random_state(z.device)
        fz = self.f(z)
        return fz, not torch.equal(before, _random_state(z.device))

    def _depends_on_others(self, z: Tensor, fz: Tensor, row: int) -> bool:
        """Whether f of one row changes when all the others are moved, or set to 0."""
        others = (torch.arange(z.shape[0], device=z.device) != row).unsqueeze(1)
        scale = z.abs().nan_to_num(0.0, 0.0, 0.0).amax().clamp_min(torch.finfo(z.dtype).tiny)
        signs = torch.cos(torch.arange(z.numel(), dtype=z.dtype, device=z.device) ** 2).reshape(z.shape)
        for moved in (z + 0.5 * scale * signs, torch.zeros_like(z)):
            try:
                value = self.f(torch.where(others, moved, z))
            except Exception:  # f need not be defined there
                continue
            if bool(differs(value[row : row + 1], fz[row : row + 1]).any()):
                return True
        return False

    def _continued(self, f: AbstractMap, spent: int) -> Closing:
        """The rest of the solve with another map; its first evaluation is the last one so far."""
        left = max(self.max_steps - spent + 1, 1)
        return Closing(f, self.solver, self.tolerance, left, record=self.record, trusted=self.trusted)

    def _together(self, outcome: Outcome, fz: Tensor, spent: int) -> Outcome:
        """Continues with all samples in every evaluation: f of some rows is not some rows of f."""
        closing = self._continued(Together(self.f, outcome.value, fz), spent)
        return _count(closing.run(outcome.value, fz), spent - 1, outcome.history)

    def _as_one(self, z: Tensor, fz: Tensor, spent: int) -> Outcome:
        """Continues with the batch as one sample."""
        f = self.f.inner if isinstance(self.f, Together) else self.f
        closing = self._continued(WholeBatch(f, z.shape), spent)
        outcome = _count(closing.run(z.reshape(1, -1), fz.reshape(1, -1)), spent - 1, [])
        outcome.coupled = not outcome.note or outcome.note == UNCONFIRMED  # else f is random, or the solver wrong
        outcome.note = outcome.note or COUPLED
        return outcome.as_batch(z.shape)


def judge(f: AbstractMap, z: Tensor, tolerance: Tolerance, steps: int) -> Outcome:
    """The outcome at a z that was found in another way: one evaluation measures its residual.

    Args:
        f: The map.
        z: (batch, features).
        tolerance: When a sample counts as converged.
        steps: Evaluations spent, this one included.
    """
    with torch.no_grad():
        before = _random_state(z.device)
        outcome = iterate(f, z, Picard(), tolerance=tolerance, max_steps=1)
        if not torch.equal(before, _random_state(z.device)):
            everywhere = torch.ones_like(outcome.codes, dtype=torch.bool)
            outcome = _not_converged(outcome, everywhere, outcome.g_norm, outcome.f_norm, RANDOM)
    outcome.steps.fill_(steps)
    return outcome


def _count(outcome: Outcome, spent: int, before: list[tuple[Tensor, Tensor, Tensor]]) -> Outcome:
    """The outcome of a continued solve, with the evaluations and the history before it."""
    outcome.steps = outcome.steps + spent
    outcome.history = [*before, *((rows, evaluations + spent, r) for rows, evaluations, r in outcome.history)]
    return outcome


def _not_converged(outcome: Outcome, rows: Tensor, r: Tensor, s: Tensor, note: str) -> Outcome:
    """Some samples have not converged, with these |f(z) - z| and |f(z)|; all, if f is random."""
    rows = rows if note != RANDOM else torch.ones_like(rows)
    outcome.codes = torch.where(rows & (outcome.codes == Status.CONVERGED), int(Status.MAX_STEPS), outcome.codes)
    outcome.g_norm, outcome.f_norm = torch.where(rows, r, outcome.g_norm), torch.where(rows, s, outcome.f_norm)
    outcome.note = note
    return outcome


def _larger(outcome: Outcome, fz: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """The larger of two residuals of a random f."""
    r, s = scaled_norm(fz - z), scaled_norm(fz)
    larger = ~(relative(r, s) <= relative(outcome.g_norm, outcome.f_norm))
    return torch.where(larger, r, outcome.g_norm), torch.where(larger, s, outcome.f_norm)


def _random_state(device: torch.device) -> Tensor:
    """The state of the generator from which f would draw on this device."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
