"""root: F(z) = 0, as the fixed point of z - F(z)."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from wellposed._checks import Policy, check_policy, check_tolerances
from wellposed._torch import apart, eager, require_values
from wellposed._tree import Layout, leaves, rebuild, scaled_norm
from wellposed.errors import InvalidArgument, WellposedWarning
from wellposed.solve._closing import COUPLED_HINT, RANDOM, SLACK, UNREPEATED, not_converged
from wellposed.solve._failure import Advising, user_level
from wellposed.solve._fixed_point import check_args, check_options
from wellposed.solve._samples import Outcome
from wellposed.solve.map import AbstractMap, FunctionMap
from wellposed.solve.newton import NewtonKrylov
from wellposed.solve.solution import Solution, SolveOptions
from wellposed.solve.solver import AbstractSolver, Tolerance
from wellposed.status import Status

ROWS_HINT = " If rows of the batch depend on each other, give coupled=True."
#: |J_F u| / |u| below which a small |F(z)| says little about the distance to a root.
FLAT = 1e-2


@eager
def root(
    F: Callable[..., Any],
    z0: Any,
    solver: AbstractSolver | None = None,
    *,
    args: tuple[Any, ...] = (),
    rtol: float = 1e-6,
    atol: float = 1e-6,
    max_steps: int = 200,
    on_failure: Policy = "warn",
    record: bool = False,
    coupled: bool = False,
) -> Solution:
    r"""Solves F(z) = 0, every sample of the batch by itself, as the fixed point of f(z) = z - F(z).

    A sample has converged when |F(z)| <= max(rtol |z - F(z)|, atol). So F is compared with z: give
    it a scale at which a change of z by 1 changes F(z) by about 1. Where F is found to be much
    flatter than that at the value returned, the solution has a note, and there is a warning. A
    sample with |F(z)| above its tolerance, but below the rounding of z, has not converged, and the
    note says so. No graph is recorded: `attach_gradient` differentiates the root.

        >>> import torch, wellposed as wp
        >>> wp.root(lambda z: z**3 - 8, torch.ones(2, 1, dtype=torch.float64)).value.squeeze(1)
        tensor([2.0000, 2.0000], dtype=torch.float64)

    Args:
        F: `F(z, *args)` of the structure and shapes of z: as many equations as unknowns.
        z0: The start, as for `fixed_point`.
        solver: `NewtonKrylov()` if not given, which needs the Jacobian of F to be invertible.
            Others work where z - F(z) suits them: `Picard()` if it contracts.
        args, max_steps, on_failure, record, coupled: As for `fixed_point`.
        rtol: Relative tolerance.
        atol: Absolute tolerance on |F(z)|. Not 0 by default: near a root z = 0 a relative one
            cannot be met.

    Returns:
        The solution; its `absolute_residual` is |F(z)| and its `residual` |F(z)| / |z - F(z)|.
    """
    solver = NewtonKrylov() if solver is None else solver
    check_options(F, solver, name="F")
    check_args(F, args)
    check_tolerances(rtol=rtol, atol=atol, max_steps=max_steps)
    check_policy(on_failure)
    require_values("root", "Call it outside of them.")
    options = _RootOptions(solver, Tolerance(rtol, atol), max_steps, on_failure, "root")
    layout = Layout.of(z0, "z0")

    def f(z: Any, *args: Any) -> Any:
        image, parts = F(z, *args), leaves(z)
        problem = layout.check(image, parts[0].shape[0])
        if problem is not None:
            raise InvalidArgument(
                f"root needs as many equations as unknowns, F(z) of the structure and shapes of z: {problem}. For another "
                "number of equations minimise |F(z)|^2 instead."
            )
        return rebuild(z, [a - b for a, b in zip(parts, leaves(image), strict=True)])

    mixed = torch.is_autocast_enabled(layout.device.type)
    with torch.no_grad(), apart(), torch.autocast(layout.device.type, enabled=False):
        start = layout.flatten(z0).detach().to(layout.compute_dtype)
        rows = FunctionMap(f, layout, args, low_precision=mixed)
        outcome = options.run(rows, start, record=record, coupled=coupled)
        at_value, slopes = _at(FunctionMap(F, layout, args, low_precision=mixed), outcome.value)
        _judge_by_F(outcome, at_value, options.tolerance, whole=coupled or outcome.coupled)
        converged = bool((outcome.codes == Status.CONVERGED).any())
        flat = _flatness(slopes) if converged and slopes is not None else ""
    solution = options.judge(outcome, layout, rows)
    if flat and on_failure != "ignore":
        warnings.warn(f"root: {flat}", WellposedWarning, stacklevel=user_level())
    return replace(solution, note=_of_F(solution.note) or flat)


class _RootOptions(SolveOptions):
    """Failures are described in terms of F."""

    coupled_hint: ClassVar[str] = ROWS_HINT

    def describe(self, solution: Solution, by: Advising, unrolled: bool) -> str:
        return _of_F(super().describe(solution, _RootAdvice(), unrolled))


class _RootAdvice:
    """What to try after a failure."""

    def advice(self, status: Status, rate: float) -> str:
        if status is Status.NOT_FINITE:
            return "Check F and its input for NaN, overflow or division by zero near this sample."
        if status is Status.MAX_STEPS and rate < 1:
            return "Raise max_steps, loosen rtol or atol, or try another start."
        return "F may have no root near this start, or a singular Jacobian on the way: try another start or another solver."


def _of_F(text: str) -> str:
    """What is said of f(z) = z - F(z), in terms of F."""
    return re.sub(r"\bf\b", "F", text.replace(COUPLED_HINT, ROWS_HINT)).replace("|F(z)-z|", "|F(z)|")


def _at(F: AbstractMap, z: Tensor) -> tuple[Tensor, Tensor | None]:
    """(batch, features) F(z), and (batch,) |J_F u| / |u| in one direction, if F has derivatives."""
    u = torch.cos(torch.arange(z.numel(), dtype=z.dtype, device=z.device) ** 2).reshape(z.shape)
    try:
        jacobian = F.jacobian(z)
        slopes = torch.linalg.vector_norm(jacobian.rmv(u), dim=1) / torch.linalg.vector_norm(u, dim=1)
    except RuntimeError:  # F need not be differentiable for a solver that only evaluates it
        return F(z), None
    return F(z) if jacobian.value is None else jacobian.value, slopes


def _judge_by_F(outcome: Outcome, at_value: Tensor, tolerance: Tolerance, *, whole: bool) -> None:
    """|F| itself in the place of |(z - F(z)) - z|, which is 0 where F is below the digits of z.

    Up to rounding a sample has still converged, but at no more than twice its tolerance.
    """
    if at_value.numel() == 0 or outcome.note in (RANDOM, UNREPEATED):
        return
    r = scaled_norm(at_value.reshape(1, -1) if whole else at_value).expand(at_value.shape[0]).cpu()
    target = tolerance.target(outcome.f_norm)
    slack = torch.minimum(SLACK * torch.finfo(r.dtype).eps * outcome.f_norm, target)
    above = (outcome.codes == Status.CONVERGED) & ~(r <= target + slack)
    outcome.g_norm = r.clone()
    if bool(above.any()):
        note = outcome.note or _rounded(int(above.nonzero()[0]), r, at_value.dtype)
        not_converged(outcome, above, r, outcome.f_norm, note)


def _rounded(row: int, r: Tensor, dtype: torch.dtype) -> str:
    return (
        f"At the value of sample {row} |F(z)| is {float(r[row]):.1e}, above its tolerance, but z - F(z) is z in {dtype}, up to "
        "rounding. Multiply F, so that a change of z by 1 changes F(z) by about 1, solve in float64, or loosen rtol or atol."
    )


def _flatness(slopes: Tensor) -> str:
    """A sentence if F hardly changes with z, in one direction, at some row, given its slopes."""
    least, row = float(slopes.min()), int(slopes.argmin())
    if not least < FLAT:
        return ""
    cure = f"Multiply F by about {1 / least:.0e}" if least > 0 else "Check F"
    return (
        f"at the value of sample {row} F changes by only {least:.1e} times a change of z, so a small |F(z)| says little about "
        f"the distance to a root. {cure}."
    )
