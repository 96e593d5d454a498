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
from wellposed._tree import Layout, leaves, rebuild
from wellposed.errors import InvalidArgument, WellposedWarning
from wellposed.solve._closing import COUPLED_HINT
from wellposed.solve._failure import Advising, user_level
from wellposed.solve._fixed_point import check_args, check_options
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
    flatter than that at the value returned, the solution has a note, and there is a warning. No
    graph is recorded: `attach_gradient` differentiates the root.

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
        converged = bool((outcome.codes == Status.CONVERGED).any())
        flat = _flatness(FunctionMap(F, layout, args, low_precision=mixed), outcome.value) if converged else ""
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


def _flatness(F: AbstractMap, z: Tensor) -> str:
    """A sentence if F hardly changes with z, in one direction, at some row of z."""
    if z.numel() == 0:
        return ""
    u = torch.cos(torch.arange(z.numel(), dtype=z.dtype, device=z.device) ** 2).reshape(z.shape)
    try:
        slope = torch.linalg.vector_norm(F.jacobian(z).rmv(u), dim=1) / torch.linalg.vector_norm(u, dim=1)
    except RuntimeError:  # F need not be differentiable for a solver that only evaluates it
        return ""
    least, row = float(slope.min()), int(slope.argmin())
    if not least < FLAT:
        return ""
    cure = f"Multiply F by about {1 / least:.0e}" if least > 0 else "Check F"
    return (
        f"at the value of sample {row} F changes by only {least:.1e} times a change of z, so a small |F(z)| says little about "
        f"the distance to a root. {cure}."
    )
