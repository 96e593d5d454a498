"""What happens when samples fail: raise, warn or go on, always with the same sentence."""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from types import FrameType
from typing import Any

import torch

from wellposed.errors import (
    AdjointNotConverged,
    CoupledRowsWarning,
    InvalidArgument,
    NotConverged,
    NotConvergedWarning,
    did_you_mean,
)
from wellposed.solve._closing import COUPLED
from wellposed.solve._solution import Solution
from wellposed.status import Status

__all__ = ["apply_policy", "check_policy", "report_coupling", "user_level"]

POLICIES = ("raise", "warn", "ignore")
#: A residual below this many roundings after this many steps is called a floor.
ROUNDINGS, MANY = 100.0, 50


def check_policy(on_failure: object) -> None:
    """One sentence for an unknown policy."""
    if on_failure not in POLICIES:
        hint = did_you_mean(str(on_failure), POLICIES)
        raise InvalidArgument(f"on_failure must be 'raise', 'warn' or 'ignore'; got {on_failure!r}.{hint}")


def apply_policy(
    solution: Solution,
    on_failure: str,
    *,
    who: str,
    solver: object,
    rtol: float,
    atol: float,
    max_steps: int,
    counts: Counter[str] | None = None,
    error: type[NotConverged] = NotConverged,
    warning: type[NotConvergedWarning] = NotConvergedWarning,
) -> None:
    """Raises or warns if a sample failed and the policy says so; a warning points at the user's own line.

    Args:
        counts: How often solves of the same owner failed, by cause; it is warned of a cause once.
        solution, on_failure, who, solver, rtol, atol, max_steps, error, warning: What is reported, and how.
    """
    failed = ~solution.converged
    if not bool(failed.any()):
        return
    again = False
    if counts is not None:
        direction = "backward" if issubclass(error, AdjointNotConverged) else "forward"
        causes = [f"{direction} {cause}" for cause in _causes(solution)]
        again = all(counts[cause] for cause in causes)
        counts.update(causes)
    if on_failure == "ignore" or (on_failure == "warn" and again):
        return
    message = describe_failure(solution, who=who, solver=solver, rtol=rtol, atol=atol, max_steps=max_steps)
    if on_failure == "raise":
        raise error(message, solution)
    if counts is not None:
        message += " Further solves of this layer that fail so are counted in its failure_counts, without a warning."
    warnings.warn(message, warning, stacklevel=user_level())


def _causes(solution: Solution) -> list[str]:
    """What went wrong with some sample: a note's first words if there is one, and the statuses."""
    notes = [solution.note.partition(":")[0]] if solution.note else []
    return notes + sorted(status.name for status in set(solution.status.tolist()) if status is not Status.CONVERGED)


def report_coupling(on_failure: str, *, who: str) -> None:
    """Warns that the rows of a batch were found to depend on each other, unless failures are to be ignored."""
    if on_failure != "ignore":
        warnings.warn(f"{who}: {COUPLED}", CoupledRowsWarning, stacklevel=user_level())


def user_level() -> int:
    """The `stacklevel`, seen from our caller, of the first frame outside this package and torch, whose wrappers lie between."""
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("wellposed", "torch"):
        frame, level = frame.f_back, level + 1
    return level


def describe_failure(solution: Solution, *, who: str, solver: Any, rtol: float, atol: float, max_steps: int) -> str:
    """Which samples failed, how, what was measured, and what to try next."""
    failed = (~solution.converged).nonzero().squeeze(1)
    i = int(failed[0])
    status = solution.status[i]
    residual, steps, rate = float(solution.residual[i]), int(solution.num_steps[i]), float(solution.rate[i])
    wanted = f"rtol={rtol:.0e}" + (f" and |f(z)-z| > atol={atol:.0e}" if atol > 0 else "")
    unrolled = type(solver).__name__ == "UnrolledGradient"
    seen = f"residual {residual:.1e} > {wanted} after {steps} steps" + ("" if unrolled else f" (max_steps={max_steps})")
    count = f"{who}: {failed.shape[0]} of {len(solution.status)} samples did not converge"
    if solution.note:
        return f"{count} (first: index {i}; residual {residual:.1e} after {steps} steps). {solution.note}"
    kept = "its best point has" if status is Status.DIVERGED else "it has"
    text = f"{count} (first: index {i}, {status.name}: {status.message}); {kept} {seen}."
    if steps > 1 and rate == rate and not unrolled:
        text += f" Its residual changed by a measured factor of {rate:.3g} per step."
    dtype = solution.residual.dtype
    floor = steps >= MANY and residual < ROUNDINGS * torch.finfo(dtype).eps
    return f"{text} {_advice(status, rate, rtol, dtype, type(solver).__name__, floor=floor)}"


def _advice(status: Status, rate: float, rtol: float, dtype: torch.dtype, solver: str, *, floor: bool) -> str:
    if status is Status.NOT_FINITE and solver in ("PeacemanRachford", "DouglasRachford"):
        return (
            "Check f and its input for NaN or overflow near this sample. If they are finite, the resolvent was not solved "
            "(a large zero-padded convolution): take a smaller step_size, or ForwardBackward(TunedStep())."
        )
    if status is Status.NOT_FINITE:
        return "Check f and its input for NaN, overflow or division by zero near this sample."
    if status is Status.MAX_STEPS and rtol < 4 * torch.finfo(dtype).eps:
        return f"rtol={rtol:.0e} is below what {dtype} resolves: raise rtol or use float64."
    if status is Status.MAX_STEPS and solver == "UnrolledGradient":
        return "Its depth is what UnrolledGradient(steps=...) says: raise it, loosen rtol, or use ImplicitGradient()."
    if status is Status.MAX_STEPS and floor:
        return (
            f"That is near the rounding of {dtype} in f (large weights that cancel lose digits), and more steps may not help: "
            "loosen rtol, or solve in float64."
        )
    if status is Status.MAX_STEPS and rate < 1:
        if solver == "Auto":  # it has tried the others already
            return "Raise max_steps or loosen rtol."
        return f"Raise max_steps, loosen rtol, or try {'Auto()' if solver == 'NewtonKrylov' else 'NewtonKrylov()'}."
    reasons = "The map may not contract, or may have no fixed point"
    if solver == "Auto":
        return f"{reasons}: constrain the cell, e.g. with Spectral(bound=0.95), or try another start."
    others = " or ".join(f"{name}()" for name in ("Auto", "NewtonKrylov") if name != solver)
    return f"{reasons}: try {others}, or constrain the cell, e.g. with Spectral(bound=0.95)."
