"""Closing a solve: no answer is called converged unless f, evaluated for the whole batch at that answer, confirms it.

The loop believes three things: that rows do not depend on each other, so that a finished one may leave; that f gives the same
value at the same point; and that a solver reports f where it says. All three hold by construction where the map and the solver
are those of this package. For any other map or solver they are checked here, by one evaluation at the end of every solve:

- a random map (dropout) gives another value there: no sample has converged;
- rows that depend on each other give another residual: the solve continues with the batch as one sample;
- a solver that reports a wrong f(z) is found in the same way: its samples have not converged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wellposed.solve._iterate import iterate
from wellposed.solve._map import ROUNDINGS, AbstractMap, FunctionMap, RowsCoupled, differs, is_built_in
from wellposed.solve._outcome import Outcome, Tolerance, relative, scaled_norm
from wellposed.solve._solver import AbstractSolver
from wellposed.solve._whole_batch import WholeBatch
from wellposed.status import Status

__all__ = ["solve_and_close"]

#: A map that draws random numbers is evaluated again until it has computed so many entries without a difference, before it is
#: believed to give one value all the same: dropout keeps four units for many evaluations in a row.
ENTRIES, MOST_REPEATS = 256, 64
#: The part of the tolerance by which two residuals at the same point may differ.
PART = 0.01
RANDOM = (
    "f is random: evaluated again at the same point it gives another value, so there is no equation to solve. Make noise such "
    "as dropout constant within a solve, or call eval()."
)
COUPLED = (
    "Rows of the batch depend on each other, so the batch was solved as one sample: status and residual are those of the whole "
    "batch. Give coupled=True to solve it in this way from the start; if rows should not depend on each other, mend f."
)


def solve_and_close(
    f: AbstractMap,
    z: Tensor,
    solver: AbstractSolver,
    *,
    tolerance: Tolerance,
    max_steps: int,
    first: Tensor | None = None,
    record: bool = False,
    keep_image: bool = False,
    coupled: bool = False,
) -> Outcome:
    """Solves z = f(z) as `iterate` does, and confirms the answer.

    Args:
        f, z, solver, tolerance, max_steps, first, record, keep_image: As for `iterate`.
        coupled: The batch is one sample: its rows depend on each other.
    """
    if coupled and z.shape[0] > 0:
        whole = WholeBatch(f, z.shape)
        begin = None if first is None else first.reshape(1, -1)
        options: dict[str, Any] = {"tolerance": tolerance, "max_steps": max_steps, "record": record, "keep_image": keep_image}
        return solve_and_close(whole, z.reshape(1, -1), solver, first=begin, **options).as_batch(z.shape)
    ours = is_built_in(*(stage for stage, _ in solver.stages()))
    if (ours and f.built_in) or z.shape[0] == 0:
        return iterate(
            f, z, solver, tolerance=tolerance, max_steps=max_steps, first=first, record=record, keep_image=keep_image
        )
    closing = _Closing(f, solver, tolerance, max_steps, record=record, trusted=ours)
    return closing.run(z, first, keep_image)


class _Closing:
    """One solve and its confirmation."""

    def __init__(
        self, f: AbstractMap, solver: AbstractSolver, tolerance: Tolerance, max_steps: int, *, record: bool, trusted: bool
    ) -> None:
        self.f, self.solver, self.tolerance, self.max_steps = f, solver, tolerance, max_steps
        self.record, self.trusted = record, trusted

    def run(self, z: Tensor, first: Tensor | None, keep_image: bool) -> Outcome:
        self.device, self.state = z.device, _random_state(z.device)
        # f as a foreign solver reports it is not to be believed: then one evaluation is left for the end in any case
        budget = self.max_steps if self.trusted else max(self.max_steps - 1, 1)
        options: dict[str, Any] = {"tolerance": self.tolerance, "max_steps": budget, "record": self.record}
        try:
            outcome = iterate(
                self.f, z, self.solver, first=first, keep_image=keep_image, closing=self.trusted and z.shape[0] > 1, **options
            )
        except RowsCoupled as found:
            return self._found_coupled(found.value, found.evaluations)
        if self._draws() and self._is_random(outcome.value):
            return self._random(outcome)
        return self._close(outcome)

    def _close(self, outcome: Outcome) -> Outcome:
        """Takes the last evaluation of the loop for the closing one if it was one of all samples, or evaluates f."""
        still = outcome.codes == Status.CONVERGED
        if not self.trusted:
            still = still | (outcome.codes == Status.MAX_STEPS)
        # samples that ran away or met NaN while they were evaluated without the others may have done so for that reason
        lost = (outcome.codes == Status.DIVERGED) | (outcome.codes == Status.NOT_FINITE)
        suspect = self._took_parts() & lost & (outcome.steps + 2 <= self.max_steps)
        alone = outcome.steps.shape[0] == 1 and int(outcome.steps) >= self.max_steps  # nothing is left, and no other row
        if alone or not bool((still | suspect).any()):
            return outcome
        if bool(suspect.any()):
            fz = self.f(outcome.value)
            if self._parts_differ(outcome.value, fz, suspect.nonzero().squeeze(1)):
                return self._all_together(outcome, fz)
        elif outcome.last is not None:
            fz = outcome.last
        else:
            # what failed does not matter: moved, it shows whether the rest depends on it
            fz = self.f(self._moved(outcome.value, ~still))
        outcome.steps = torch.where(still, (outcome.steps + 1).clamp_max(self.max_steps), outcome.steps)
        return self._confirm(outcome, fz, still)

    def _confirm(self, outcome: Outcome, fz: Tensor, still: Tensor) -> Outcome:
        """Compares the residuals of the whole batch with those that the loop has seen.

        Args:
            outcome: What the loop returned.
            fz: (batch, features) f of the whole batch there.
            still: (batch,) which samples were evaluated where they are returned.
        """
        r, s = scaled_norm(fz - outcome.value), scaled_norm(fz)
        claimed = outcome.codes == Status.CONVERGED
        met = r <= self.tolerance.target(s)
        rounding = ROUNDINGS * torch.finfo(r.dtype).eps * (s + r)
        differ = still & ~((r - outcome.g_norm).abs() <= rounding + PART * self.tolerance.target(s))
        if bool(differ.any()):
            explained = self._explain(outcome, differ)
            if explained is not None:
                return explained
        # a residual that was small enough in a smaller batch was measured too; beyond rounding the two are the same
        kept = claimed & met
        outcome.g_norm, outcome.f_norm = torch.where(kept, r, outcome.g_norm), torch.where(kept, s, outcome.f_norm)
        if outcome.image is not None:
            outcome.image = torch.where(claimed.unsqueeze(1), fz, outcome.image)
        if self.record:
            rows = still.nonzero().squeeze(1)
            outcome.history.append((rows, outcome.steps[rows], relative(outcome.g_norm, outcome.f_norm)[rows]))
        return outcome

    def _explain(self, outcome: Outcome, differ: Tensor) -> Outcome | None:
        """Finds out why some samples have another residual in the whole batch; None if it is within their tolerance."""
        fz = self.f(outcome.value)
        if self._is_random(outcome.value, fz):
            return self._random(outcome)
        r, s = scaled_norm(fz - outcome.value), scaled_norm(fz)
        worst = int(torch.where(differ, r / s, -1.0).nan_to_num(torch.inf).argmax())
        if self._depends_on_others(outcome.value, fz, worst):
            return self._as_one(outcome.value, fz, int(outcome.steps.max()))
        wrong = differ & ~((outcome.codes == Status.CONVERGED) & (r <= self.tolerance.target(s)))
        if not bool(wrong.any()):
            return None
        if self._took_parts():
            return self._all_together(outcome, fz)
        if self.trusted:
            return None  # every evaluation was one of all samples: what differs is rounding
        outcome.g_norm, outcome.f_norm = torch.where(wrong, r, outcome.g_norm), torch.where(wrong, s, outcome.f_norm)
        outcome.codes = torch.where(wrong, int(Status.MAX_STEPS), outcome.codes)
        outcome.note = (
            f"{type(self.solver).__name__}.step reports an f(z) that f does not give at that z: its Step must hold f evaluated "
            "at Step.z."
        )
        return outcome

    def _took_parts(self) -> bool:
        """Whether samples were evaluated without the others."""
        return isinstance(self.f, FunctionMap) and self.f.taken and not self.f.whole_only

    def _parts_differ(self, z: Tensor, fz: Tensor, rows: Tensor) -> bool:
        """Whether f of some rows alone is not what it is among the others."""
        assert isinstance(self.f, FunctionMap)
        part = self.f.alone(rows)(z[rows])
        return bool(differs(part, fz[rows]).any())

    def _all_together(self, outcome: Outcome, fz: Tensor) -> Outcome:
        """Continues with all samples in every evaluation: f counts its rows, or an argument was taken for one of samples."""
        assert isinstance(self.f, FunctionMap)
        self.f.whole_only = True
        again = _Closing(self.f, self.solver, self.tolerance, self.max_steps, record=self.record, trusted=self.trusted)
        result = again.run(outcome.value, fz, keep_image=False)
        result.history = [*outcome.history, *((i, outcome.steps[i] + k, r) for i, k, r in result.history)]
        result.steps = outcome.steps + result.steps
        return result

    def _draws(self) -> bool:
        """Whether f has drawn random numbers of torch."""
        return not torch.equal(self.state, _random_state(self.device))

    def _is_random(self, z: Tensor, value: Tensor | None = None) -> bool:
        value = self.f(z) if value is None else value
        repeats = min(max(ENTRIES // max(z.numel(), 1), 2), MOST_REPEATS) if self._draws() else 1
        return any(bool(differs(self.f(z), value).any()) for _ in range(repeats))

    def _random(self, outcome: Outcome) -> Outcome:
        """No sample has converged; the residual reported is the largest of two evaluations."""
        for _ in range(2):
            fz = self.f(outcome.value)
            r, s = scaled_norm(fz - outcome.value), scaled_norm(fz)
            larger = ~(relative(r, s) <= relative(outcome.g_norm, outcome.f_norm))
            outcome.g_norm, outcome.f_norm = torch.where(larger, r, outcome.g_norm), torch.where(larger, s, outcome.f_norm)
        outcome.codes = torch.where(outcome.codes == Status.CONVERGED, int(Status.MAX_STEPS), outcome.codes)
        outcome.note = RANDOM
        return outcome

    def _depends_on_others(self, z: Tensor, fz: Tensor, row: int) -> bool:
        """Whether f of one row changes as all the others are moved, or set to 0."""
        if z.shape[0] == 1:
            return False
        others = torch.arange(z.shape[0], device=z.device) != row
        for moved in (self._moved(z, others), torch.where(others.unsqueeze(1), 0.0, z)):
            if bool(differs(self.f(moved)[row : row + 1], fz[row : row + 1]).any()):
                return True
        return False

    def _moved(self, z: Tensor, rows: Tensor) -> Tensor:
        """z with some rows, given by a mask, moved by up to half of its largest entry."""
        if not bool(rows.any()):
            return z
        scale = z.abs().nan_to_num(0.0, 0.0, 0.0).amax().clamp_min(torch.finfo(z.dtype).tiny)
        signs = torch.cos(torch.arange(z.numel(), dtype=z.dtype, device=z.device) ** 2).reshape(z.shape)
        return torch.where(rows.unsqueeze(1), z + 0.5 * scale * signs, z)

    def _found_coupled(self, z: Tensor, steps: int) -> Outcome:
        """Rows that stood still have changed: because others moved, or because f is random."""
        fz = self.f(z)
        if self._is_random(z, fz):
            outcome = Outcome.like(z, keep_image=False)
            outcome.value, outcome.g_norm, outcome.f_norm = z, scaled_norm(fz - z), scaled_norm(fz)
            outcome.codes.fill_(int(Status.MAX_STEPS))
            outcome.steps.fill_(steps + 1)
            return self._random(outcome)
        return self._as_one(z, fz, steps + 1)

    def _as_one(self, z: Tensor, fz: Tensor, steps: int) -> Outcome:
        """Continues with the batch as one sample."""
        outcome = solve_and_close(
            WholeBatch(self.f, z.shape),
            z.reshape(1, -1),
            self.solver,
            tolerance=self.tolerance,
            max_steps=max(self.max_steps - steps + 1, 1),  # the first evaluation is fz, which was counted
            first=fz.reshape(1, -1),
            record=self.record,
        )
        outcome.steps = outcome.steps + (steps - 1)
        outcome.history = [(rows, evaluations + steps - 1, r) for rows, evaluations, r in outcome.history]
        outcome.coupled = True
        outcome.note = outcome.note or COUPLED
        return outcome.as_batch(z.shape)


def _random_state(device: torch.device) -> Tensor:
    """The state of the generator that f would draw from on this device, if it draws."""
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.get_rng_state()
