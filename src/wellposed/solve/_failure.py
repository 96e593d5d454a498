"""What is said about samples that failed, and at which line of the user."""

from __future__ import annotations

import sys
from types import FrameType
from typing import TYPE_CHECKING, Protocol

import torch

from wellposed.status import Status

if TYPE_CHECKING:
    from wellposed.solve.solution import Solution, SolveOptions

#: A residual below this many roundings after this many steps has reached its floor.
ROUNDINGS, MANY = 100.0, 50
FELL = 0.99  #: A greater factor per step: |f(z) - z| has not fallen to its floor, only |f(z)| is large.


class Advising(Protocol):
    """A solver, or another part of a solve, that can say what to try after a failure."""

    def advice(self, status: Status, rate: float) -> str: ...


def describe(options: SolveOptions, solution: Solution, by: Advising, unrolled: bool) -> str:
    """Which samples failed, how, what was measured, and what to try next.

    Args:
        options: Of the solve. solution: Its answer.
        by: What gives advice.
        unrolled: Whether a network of given depth was evaluated, and nothing solved.
    """
    failed = (~solution.converged).nonzero().squeeze(1)
    i = int(failed[0])
    status = solution.status[i]
    residual, steps, rate = float(solution.residual[i]), int(solution.num_steps[i]), float(solution.rate[i])
    count = f"{options.owner}: {failed.shape[0]} of {len(solution.status)} samples did not converge"
    if solution.note:
        return (
            f"{count} (first: index {i}; residual {residual:.1e} after {steps} step{'s' if steps > 1 else ''}). {solution.note}"
        )
    rtol, atol = options.tolerance.rtol, options.tolerance.atol
    wanted = f"rtol={rtol:.0e}" + (f" and |f(z)-z| > atol={atol:.0e}" if atol > 0 else "")
    kept = "its best point has" if status is Status.DIVERGED else "it has"
    how = "" if unrolled and status is Status.MAX_STEPS else f", {status.name}: {status.message}"  # max_steps had no part in it
    spent = "" if unrolled and steps == 1 else f" after {steps} step{'s' if steps > 1 else ''}"
    text = f"{count} (first: index {i}{how}); {kept} residual {residual:.1e} > {wanted}{spent}"
    text += "." if unrolled else f" (max_steps={options.max_steps})."
    if 1 < len(failed) < len(solution.status):
        others, more = ", ".join(map(str, failed[1:6].tolist())), len(failed) - 6
        text += f" The others: index {others}" + (f" and {more} more." if more > 0 else ".")
    if steps > 1 and rate == rate and not unrolled:
        factor = f"{rate:.3g}" if abs(rate - 1) > 0.005 else f"{rate:.8g}"
        text += f" Its residual changed by a measured factor of {factor} per step on average."
    dtype = solution.residual.dtype
    eps = torch.finfo(dtype).eps
    if status is Status.MAX_STEPS and rtol < 4 * eps and atol == 0:
        return f"{text} rtol={rtol:.0e} is below what {dtype} resolves: raise rtol or use float64."
    if status is Status.MAX_STEPS and not unrolled and steps >= MANY and residual < ROUNDINGS * eps and rate < FELL:
        return (
            f"{text} That is near the rounding of {dtype} in f (large weights that cancel lose digits), and more steps may "
            "not help: loosen rtol, or solve in float64."
        )
    if status is Status.MAX_STEPS and not unrolled and steps <= 2:
        return f"{text} Raise max_steps: so few steps do not show whether the map contracts."
    return f"{text} {by.advice(status, rate)}"


def user_level() -> int:
    """The `stacklevel`, for our caller, of the first frame outside this package and torch."""
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("wellposed", "torch"):
        frame, level = frame.f_back, level + 1
    return level
