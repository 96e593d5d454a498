"""The answer of a solve, how it is judged, and what happens when samples fail."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from wellposed._checks import Policy
from wellposed._torch import apart, random_state, saved_tensors_hooked, watched
from wellposed._tree import Layout, differs, map_leaves, relative
from wellposed.errors import (
    AdjointNotConverged,
    AdjointNotConvergedWarning,
    CoupledRowsWarning,
    InvalidArgument,
    NotConverged,
    NotConvergedWarning,
)
from wellposed.linalg.directed import round_up
from wellposed.solve._closing import COUPLED, COUPLED_GROUPS, COUPLED_HINT, RANDOM, Closing, not_converged
from wellposed.solve._failure import Advising, describe, user_level
from wellposed.solve._record import SolveRecord
from wellposed.solve._samples import Outcome
from wellposed.solve._whole_batch import WholeBatch, as_batch
from wellposed.solve.loop import iterate
from wellposed.solve.map import AbstractMap
from wellposed.solve.solver import AbstractSolver, Picard, Tolerance, is_built_in
from wellposed.status import Status, StatusArray


@dataclass(frozen=True, eq=False)
class Solution:
    """The result of a solve.

    Attributes:
        value: Same structure as the start, batch first. For a sample that failed, the point with
            the least |f(z) - z| among those at which it was judged: not every step, and the same
            ones with `record=True`. A float16 or bfloat16 start is solved in float32.
        residual: (batch,) |f(z) - z| / |f(z)|, measured at `value`.
        absolute_residual: (batch,) |f(z) - z|, measured at `value`.
        num_steps: (batch,) evaluations of f that each sample took part in, at most max_steps; a
            product with the Jacobian counts as one. The evaluations that check an answer are
            included; a sample that diverged or met NaN may take part in up to five of them in a
            batch, and in none alone.
        status: (batch,) of `Status`.
        rate: (batch,) mean factor by which |f(z) - z| changed per evaluation; for `Picard` the
            measured contraction.
        history: (steps, batch) relative residual after each evaluation at which it was measured,
            NaN elsewhere; None unless `record=True`.
        note: What f, evaluated for the whole batch at `value`, showed beyond the numbers: that rows
            depend on each other, or that f is random. Mostly empty.

    Examples:
        >>> import torch, wellposed as wp
        >>> solution = wp.fixed_point(lambda z: 0.5 * z + 1, torch.zeros(3, 1, dtype=torch.float64))
        >>> solution.value.flatten().round(decimals=4).tolist()
        [2.0, 2.0, 2.0]
        >>> bool((solution.residual < 1e-6).all())
        True
        >>> bool((solution.error_bound(0.5) < 1e-5).all())
        True
    """

    value: Any
    residual: Tensor
    absolute_residual: Tensor
    num_steps: Tensor
    status: StatusArray
    rate: Tensor
    history: Tensor | None = None
    note: str = ""

    @property
    def converged(self) -> Tensor:
        """(batch,) bool."""
        return self.status.codes == Status.CONVERGED

    def error_bound(self, contraction: float | Tensor) -> Tensor:
        """(batch,) upper bound of |z - z*|, if f contracts with factor at most `contraction` < 1.

        Banach: |z - z*| <= |f(z) - z| / (1 - contraction), in the norm of all features of a sample
        together. The residual is computed in floating point; its own rounding, some eps |f(z)|, is
        not part of the bound. What follows from it is rounded upward.

        Args:
            contraction: An upper bound of the contraction factor of f, in [0, 1); one number, or
                one per sample.
        """
        residual = self.absolute_residual.double()
        factor = torch.as_tensor(contraction, dtype=torch.float64, device=residual.device)
        if not bool(((factor >= 0) & (factor < 1)).all()):
            raise InvalidArgument(
                f"error_bound needs a contraction factor in [0, 1); got {contraction}. "
                "Without contraction the residual alone does not bound the distance to an equilibrium."
            )
        # 1 - q is rounded by at most half a unit, and so is the quotient
        return round_up(residual / (1.0 - factor) * (1.0 + 2.0**-51), self.absolute_residual.dtype)

    def as_batch(self, shape: torch.Size) -> Solution:
        """The solution of one sample that is a whole batch, for every row of it."""
        names = ("residual", "absolute_residual", "num_steps", "rate")
        numbers = {name: getattr(self, name).expand(shape[0]) for name in names}
        status = StatusArray(self.status.codes.expand(shape[0]))
        return replace(self, value=self.value.reshape(shape), status=status, **numbers)

    def __repr__(self) -> str:
        worst = f"{float(self.residual.max()):.1e}" if len(self.status) else "none"
        most = int(self.num_steps.max()) if len(self.status) else 0
        return f"Solution({self.status!r}, residual <= {worst}, num_steps <= {most})"


def as_solution(outcome: Outcome, layout: Layout | None = None) -> Solution:
    """The outcome of a run in the structure of the caller; as rows without a `layout`."""
    history = None
    if outcome.history:
        history = outcome.g_norm.new_full((int(outcome.steps.max()), outcome.steps.shape[0]), torch.nan)
        for samples, evaluations, residual in outcome.history:
            history[evaluations - 1, samples] = residual
    numbers = [relative(outcome.g_norm, outcome.f_norm), outcome.g_norm, outcome.steps, outcome.codes, outcome.rate]
    if outcome.value.device.type != "cpu":
        numbers = [column.to(outcome.value.device) for column in numbers]
    residual, absolute, steps, codes, rate = numbers
    value = outcome.value if layout is None else layout.unflatten(outcome.value)
    return Solution(value, residual, absolute, steps, StatusArray(codes), rate, history, outcome.note)


def read_record(record: SolveRecord, name: str) -> Solution | None:
    """The "solution" or the "adjoint" of a layer, which is made when it is asked for.

    Its value is a copy: the solve's own is part of a graph, or of a gradient that the caller has.
    """
    found = getattr(record, name)
    if isinstance(found, partial):
        made = found()
        setattr(record, name, found := replace(made, value=map_leaves(torch.clone, made.value)))
    return found


@dataclass(frozen=True)
class SolveOptions:
    """How equations z = f(z) are solved and judged: the one path of all solves.

    Attributes:
        solver: The method.
        tolerance: When a sample is done.
        max_steps: Evaluations of f that each sample may take part in.
        on_failure: What to do about samples that fail.
        owner: The part of the library that solves, as error messages call it.
        record: Of the layer, if one solves: then each cause of failure is warned of once.
        shape: (batch, features) of its rows, if the batch is solved as one sample.
    """

    solver: AbstractSolver
    tolerance: Tolerance
    max_steps: int
    on_failure: Policy
    owner: str
    record: SolveRecord | None = None
    shape: torch.Size | None = None
    coupled_hint: ClassVar[str] = COUPLED_HINT  #: What a message says where rows may depend on each other.

    def run(
        self,
        f: AbstractMap,
        z: Tensor,
        *,
        first: Tensor | None = None,
        record: bool = False,
        keep_image: bool = False,
        coupled: bool = False,
        graph: bool = False,
    ) -> Outcome:
        """Solves z = f(z); if map or solver are foreign, an evaluation confirms the answer.

        Args:
            f, z, first, record, keep_image: As for `iterate`.
            coupled: The batch is one sample: its rows depend on each other.
            graph: Whether the evaluation that confirms is recorded for a gradient.
        """
        if coupled and z.shape[0] > 0:
            first = None if first is None else first.reshape(1, -1)
            outcome = self.run(WholeBatch(f, z.shape), z.reshape(1, -1), first=first, record=record, keep_image=keep_image)
            return as_batch(outcome, z.shape)
        trusted = is_built_in(*(part for stage in self.solver.stages() for part in stage if part is not None))
        if (trusted and f.built_in) or z.shape[0] == 0:
            budget: dict[str, Any] = {"tolerance": self.tolerance, "max_steps": self.max_steps}
            return iterate(f, z, self.solver, first=first, record=record, keep_image=keep_image, **budget)
        closing = Closing(f, self.solver, self.tolerance, self.max_steps, record=record, trusted=trusted)
        return closing.run(z, first, keep_image, graph)

    def judge(self, outcome: Outcome, layout: Layout, f: AbstractMap, by: Advising | None = None) -> Solution:
        """The solution of an outcome of f; applies the policy, with `by` as for `apply_policy`."""
        if self.shape is not None and outcome.value.shape[0] != self.shape[0]:
            outcome = as_batch(outcome, self.shape)
        outcome = replace(outcome, value=f.rows(outcome.value)) if f.regroups else outcome
        solution = as_solution(outcome, layout)
        if self.record is not None:
            self.record.solution = solution
        if outcome.coupled:
            self.report_coupling(COUPLED_GROUPS if f.regroups else COUPLED)
        self.apply_policy(solution, by=by, row_wise=f.built_in or f.regroups or self.shape is not None)
        return solution

    def keep(self, outcome: Outcome, layout: Layout, f: AbstractMap, by: Advising | None = None) -> None:
        """As `judge`, for a layer; the solution is made when it is read, if no sample failed."""
        if self.record is None or self.shape is not None or f.regroups or not outcome.is_good:
            self.judge(outcome, layout, f, by)
        else:
            self.record.solution = partial(as_solution, replace(outcome, image=None, at_once=None, recorded=None), layout)

    def keep_adjoint(self, outcome: Outcome) -> bool:
        """Whether the adjoint system of a layer is solved for every row, which is recorded."""
        if self.record is None or self.shape is not None or not outcome.is_good:
            return False
        self.record.adjoint = partial(as_solution, outcome)
        return True

    def finish_adjoint(self, solution: Solution, by: Advising | None) -> None:
        """Records the solution of an adjoint system and applies the policy to its failures."""
        if self.record is not None:
            batch = self.shape is not None and len(solution.status) != self.shape[0]
            self.record.adjoint = solution.as_batch(self.shape) if self.shape is not None and batch else solution
        self.apply_policy(solution, by=by, adjoint=True)

    def report_coupling(self, found: str = COUPLED) -> None:
        """Warns that rows were `found` to depend on each other, once per training mode of a layer.

        The next solve of the layer takes it into account, unless hooks on saved tensors are active:
        the second run of a checkpoint must save the same tensors as the first.
        """
        if (record := self.record) is not None:
            if not saved_tensors_hooked():
                record.coupled.add(record.training)
            if record.training in record.warned:
                return
            record.warned.add(record.training)
        if self.on_failure != "ignore":
            warnings.warn(f"{self.owner}: {found}", CoupledRowsWarning, stacklevel=user_level())

    def describe(self, solution: Solution, by: Advising, unrolled: bool) -> str:
        return describe(self, solution, by, unrolled)

    def apply_policy(
        self, solution: Solution, *, by: Advising | None = None, adjoint: bool = False, row_wise: bool = True
    ) -> None:
        """Raises or warns if a sample failed, by the policy; a warning points at the user's line.

        Args:
            solution: The answer.
            by: What gives advice, if it is not the solver: an unrolled network, or a linear solver.
            adjoint: Whether the linear system of a backward pass was solved.
            row_wise: Whether samples are known not to depend on each other.
        """
        if bool(solution.converged.all()):
            return
        again = False
        if self.record is not None:
            names = [solution.note.partition(":")[0]] if solution.note else []
            names += sorted(status.name for status in set(solution.status.tolist()) if status is not Status.CONVERGED)
            causes = [f"{'backward' if adjoint else 'forward'} {name}" for name in names]
            again = all(self.record.failures[cause] for cause in causes)
            self.record.failures.update(causes)
        if self.on_failure == "ignore" or (self.on_failure == "warn" and again):
            return
        unrolled = by is not None and not adjoint
        message = self.describe(solution, self.solver if by is None else by, unrolled)
        if not (row_wise or unrolled or solution.note or solution.converged.any() or len(solution.status) == 1):
            message += self.coupled_hint  # a sample that left the batch and was confirmed would not depend on the others
        if self.on_failure == "raise":
            raise (AdjointNotConverged if adjoint else NotConverged)(message, solution)
        if self.record is not None:
            message += " Further failures of this kind give no warning; they are counted in layer.failure_counts."
        warning = AdjointNotConvergedWarning if adjoint else NotConvergedWarning
        warnings.warn(message, warning, stacklevel=user_level())


def judge(f: AbstractMap, z: Tensor, tolerance: Tolerance, steps: int) -> Outcome:
    """The outcome at a z that was found in another way: one evaluation measures its residual.

    Args:
        f: The map.
        z: (batch, features).
        tolerance: When a sample counts as converged.
        steps: Evaluations spent, this one included.
    """
    with torch.no_grad(), apart():
        before = random_state(z.device)
        outcome = iterate(f, z, Picard(), tolerance=tolerance, max_steps=1, keep_image=True)
        if not torch.equal(before, random_state(z.device)):
            again, drawn = watched(f, z)
            steps += 1
            if drawn or outcome.image is None or bool(differs(again, outcome.image).any()):
                not_converged(outcome, outcome.codes >= 0, outcome.g_norm, outcome.f_norm, RANDOM)
    outcome.steps.fill_(steps)
    return outcome
