"""Forward-backward steps that every sample tunes by itself; see `_tuning` for what is measured.

Steps are taken in blocks of `BLOCK` with one step size, and only the last of a block is measured: a measurement costs some ten
passes over the state. Blocks begin at the same steps for everybody, so no sample's answer depends on its neighbours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from wellposed.solve._tuning import minimal_residual
from wellposed.solve.solver import Point, Step

if TYPE_CHECKING:
    from wellposed.solve.splitting import AbstractSplitMap

__all__ = ["begin", "step"]

#: Steps between two measurements.
BLOCK = 4
#: Steps after which a run is judged.
WINDOW = 20
#: The part of the contraction promised along its displacements that a run must show in a window.
LEAST_PROGRESS = 0.1
#: Steps over which one relaxation is measured, the first one, the factor between two, and the largest.
TRIAL, FIRST_OVER, OVER_FACTOR, MOST_OVER = 12, 1.3, 1.15, 1.9
#: After a window with progress the longest step may be this much longer.
LENGTHEN = 1.5


def begin(split: AbstractSplitMap, point: Point) -> dict[str, Any]:
    """The state of a run that starts at `point`."""
    affine = split.affine_at_start(point.z)
    start = torch.lerp(point.z, split.prox(affine, 1.0), 0.5)
    affine_there = split.affine(start)
    d = start - point.z
    a, _ = minimal_residual(d, d - (affine_there - affine), 1.0, torch.inf)
    return {
        "affine": affine,
        "step_size": torch.where(a > 0, a, 1.0),  # NaN where the start is the equilibrium
        "longest": torch.full_like(a, torch.inf),
        "promised": torch.zeros_like(a),  # the sum of log factors since the last judgement
        "best": torch.full_like(a, torch.inf),  # the least |f(z) - z| seen, and where
        "best_z": point.z,
        "best_affine": affine,
        "reference": torch.full_like(a, torch.inf),  # `best` at the last judgement
        "over": torch.full_like(a, FIRST_OVER),  # by which steps are longer than the one of least factor
        "trend": torch.full_like(a, OVER_FACTOR),  # what it is multiplied with next
        "speed": torch.full_like(a, torch.inf),  # log |f(z) - z| per step of the last trial, and its beginning
        "begin": torch.full_like(a, torch.inf),
        "trial": torch.full_like(a, TRIAL),  # steps until the next trial
        "due": torch.full_like(a, WINDOW),  # steps until the next judgement
        "window": torch.full_like(a, WINDOW),
    }


def step(state: dict[str, Any], split: AbstractSplitMap, point: Point) -> Step:
    """A block of steps, or one if the budget does not allow more."""
    z, affine = point.z, state["affine"]
    r = point.r.unsqueeze(1)
    _keep_best(state, z, affine, r)
    if bool((state["due"] <= 0).any()):
        z, affine = _judge(state, z, affine, r)
    if bool((state["trial"] <= 0).any()):
        _relax(state, r)
    a = state["step_size"]
    steps = BLOCK if int(point.budget.min()) >= BLOCK else 1
    for _ in range(steps - 1):
        z = split.prox(torch.lerp(z, affine, a), a)
        affine = split.affine(z)
    following = split.prox(torch.lerp(z, affine, a), a)
    affine_there = split.affine(following)
    d = following - z
    measured, log_factor = minimal_residual(d, torch.sub(affine, affine_there).add_(d), state["over"], state["longest"])
    usable = measured > 0  # not where nothing moved
    state["step_size"] = torch.where(usable, measured, a)
    state["promised"] = state["promised"] + steps * torch.where(usable, log_factor, 0.0)
    state["affine"] = affine_there
    state["due"], state["trial"] = state["due"] - steps, state["trial"] - steps
    return Step(following, split.prox(affine_there, 1.0), steps)


def _keep_best(state: dict[str, Any], z: Tensor, affine: Tensor, r: Tensor) -> None:
    better = r < state["best"]
    state["best"] = torch.minimum(state["best"], r)
    if bool(better.all()):
        state["best_z"], state["best_affine"] = z, affine
    else:
        state["best_z"] = torch.where(better, z, state["best_z"])
        state["best_affine"] = torch.where(better, affine, state["best_affine"])


def _relax(state: dict[str, Any], r: Tensor) -> None:
    """Goes on with longer (or shorter) steps while they are the faster ones, else turns round."""
    due = state["trial"] <= 0
    speed = torch.log(r / state["begin"]) / TRIAL
    known = due & state["begin"].isfinite()
    slower = known & (speed > state["speed"])
    state["trend"] = torch.where(slower, 1 / state["trend"], state["trend"])
    state["over"] = torch.where(known, (state["over"] * state["trend"]).clamp(1.0, MOST_OVER), state["over"])
    state["speed"] = torch.where(known, speed, state["speed"])
    state["begin"] = torch.where(due, r, state["begin"])
    state["trial"] = torch.where(due, TRIAL, state["trial"])


def _judge(state: dict[str, Any], z: Tensor, affine: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    """Shorter steps for samples that break the promise of their displacements; back to the best point if they grew."""
    due = state["due"] <= 0
    shown = torch.log(state["best"] / state["reference"])
    failed = due & (shown > LEAST_PROGRESS * state["promised"]) & state["reference"].isfinite()
    shorter = state["step_size"] / 2
    state["longest"] = torch.where(failed, shorter, torch.where(due, LENGTHEN * state["longest"], state["longest"]))
    state["step_size"] = torch.where(failed, shorter, state["step_size"])
    # |f(z) - z| may rise while z comes nearer; a window three times as long as the step is short shows in the end.
    state["window"] = torch.where(failed, 3 * state["window"], state["window"])
    state["due"] = torch.where(due, state["window"], state["due"])
    state["reference"] = torch.where(due, state["best"], state["reference"])
    state["promised"] = torch.where(due, 0.0, state["promised"])
    grown = failed & (r > 2 * state["best"])
    return torch.where(grown, state["best_z"], z), torch.where(grown, state["best_affine"], affine)
