"""fixed_point: the one entry point of solving."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wellposed._eager import eager
from wellposed._tree import Layout
from wellposed.errors import InvalidArgument, InvalidType, WellposedError
from wellposed.solve._closing import solve_and_close
from wellposed.solve._failure import apply_policy, check_policy, report_coupling
from wellposed.solve._function_map import FunctionMap
from wellposed.solve._map import AbstractMap
from wellposed.solve._outcome import Outcome, Tolerance, relative
from wellposed.solve._solution import Solution
from wellposed.solve._transforms import transforms_active
from wellposed.solve._unhooked import unhooked
from wellposed.solve.auto import Auto
from wellposed.solve.solver import AbstractSolver
from wellposed.status import StatusArray

__all__ = ["fixed_point"]


@eager  # a loop that decides by values gains nothing from being traced
def fixed_point(
    f: Callable[..., Any] | AbstractMap,
    z0: Any,
    solver: AbstractSolver | None = None,
    *,
    args: tuple[Any, ...] = (),
    rtol: float = 1e-6,
    atol: float = 0.0,
    max_steps: int = 200,
    on_failure: str = "warn",
    record: bool = False,
    coupled: bool = False,
) -> Solution:
    r"""Solves z = f(z), every sample of the batch by itself.

    A sample has converged when |f(z) - z| <= max(rtol |f(z)|, atol), norms over all features of that sample. It then leaves
    the computation: it takes part in no further evaluation, and what it returns does not depend on its neighbours beyond
    rounding. The last evaluation is one of the whole batch at the value returned, and confirms it: rows that depend on each
    other, a random f and a solver that reports a wrong f(z) are found by it. Runs without a graph; `EquilibriumLayer`
    differentiates.

        >>> import torch, wellposed as wp
        >>> sol = wp.fixed_point(lambda z: 0.8 * z + 1, torch.zeros(3, 1, dtype=torch.float64))
        >>> sol.value.squeeze(1)
        tensor([5.0000, 5.0000, 5.0000], dtype=torch.float64)

    Args:
        f: `f(z, *args)` of the same structure and shapes as z, row-wise: sample i of the result depends on sample i alone,
            unless `coupled`.
        z0: The start: a tensor, or a tuple, list or dict of tensors, batch first, real floating point. float16 and
            bfloat16 are solved in float32.
        solver: `Auto()` if not given.
        args: What else f takes. Tensors (or structures of tensors) whose first dimension is the batch follow their
            samples. Per-sample data that f captures instead works too, but then finished samples can only stand still:
            f is evaluated for the whole batch.
        rtol: Relative tolerance. It does not count as met where |f(z)| has grown more than tenfold while |f(z) - z| has not
            even halved: there the one is small beside the other because z runs away, not because a fixed point is near.
        atol: Absolute tolerance on |f(z) - z|.
        max_steps: How many evaluations of f a sample may take part in.
        on_failure: "raise" (`NotConverged`), "warn" (`NotConvergedWarning`) or "ignore". `Solution.status` tells in any case.
        record: Keep the residuals of all steps in `Solution.history`.
        coupled: Rows depend on each other (nodes of a graph, batch statistics): the batch is solved as one sample. All rows
            then have the same status, and the residual of the whole batch.
    """
    solver = Auto() if solver is None else solver
    check_options(f, solver, args, rtol, atol, max_steps)
    check_policy(on_failure)
    if transforms_active():
        raise WellposedError(
            "fixed_point decides by values, which torch.func transforms hide. Inside them use EquilibriumLayer instead."
        )
    layout = Layout.of(z0, "z0")
    mixed = torch.is_autocast_enabled(layout.device.type)
    with torch.no_grad(), unhooked(), torch.autocast(layout.device.type, enabled=False):
        start = layout.flatten(z0).detach().to(layout.compute_dtype)
        flat = f if isinstance(f, AbstractMap) else FunctionMap(f, layout, args, low_precision=mixed)
        outcome = solve_and_close(
            flat, start, solver, tolerance=Tolerance(rtol, atol), max_steps=max_steps, record=record, coupled=coupled
        )
        solution = as_solution(outcome, layout)
    if outcome.coupled:
        report_coupling(on_failure, who="fixed_point")
    apply_policy(solution, on_failure, who="fixed_point", solver=solver, rtol=rtol, atol=atol, max_steps=max_steps)
    return solution


def as_solution(outcome: Outcome, layout: Layout) -> Solution:
    """The outcome of a run in the caller's structure."""
    return Solution(
        value=layout.unflatten(outcome.value),
        residual=relative(outcome.g_norm, outcome.f_norm),
        absolute_residual=outcome.g_norm,
        num_steps=outcome.steps,
        status=StatusArray(outcome.codes),
        rate=outcome.rate,
        history=_history(outcome) if outcome.history else None,
        note=outcome.note,
    )


def _history(outcome: Outcome) -> Tensor:
    most = int(outcome.steps.max())
    history = outcome.g_norm.new_full((most, outcome.steps.shape[0]), torch.nan)
    for samples, evaluations, residual in outcome.history:
        history[evaluations - 1, samples] = residual
    return history


def check_options(f: Any, solver: Any, args: Any, rtol: Any, atol: Any, max_steps: Any, *, name: str = "f") -> None:
    """One sentence for whatever is wrong with the arguments of a solve."""
    if not callable(f):
        raise InvalidType(f"{name} must be callable; got {type(f).__name__}.")
    if not isinstance(solver, AbstractSolver):
        hint = " Choices are objects: give Anderson(), not its name or class." if isinstance(solver, (str, type)) else ""
        raise InvalidType(f"solver must be a solver such as Auto() or Anderson(); got {solver!r}.{hint}")
    if not isinstance(args, tuple):
        raise InvalidType(f"args must be a tuple; got {type(args).__name__}. For one argument write args=(x,).")
    if args and isinstance(f, AbstractMap):
        raise InvalidArgument(f"{type(f).__name__} holds what it needs, so args must be empty; got {len(args)}.")
    for option, value in (("rtol", rtol), ("atol", atol)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise InvalidArgument(f"{option} must be a finite float of at least 0; got {value!r}.")
    if isinstance(max_steps, bool) or not isinstance(max_steps, int) or max_steps < 1:
        raise InvalidArgument(f"max_steps must be an integer of at least 1; got {max_steps!r}.")
