r"""Step sizes from measured contraction.

Both rules use a displacement d of the iteration and F d, F = I - W, known without a product.

*Forward-backward.* Along d the factor of a step a is |d - a F d|/|d|, least at the minimal-residual
step a = <d, F d>/|F d|^2. It is at least m/L^2, the certified step size, because
<d, F d> >= m |d|^2 and |F d| <= L |d|. The steps taken are `over` times as long, 1 <= over < 2:
along d that is still a contraction, and the slow directions, hidden below the fast ones, often need
longer steps. `over` is moved up or down by the measured residuals of each sample.

*Reflections.* Peaceman-Rachford converges for every a > 0. On d' = (I + aF) d its affine reflection
has the factor

    |d - a F d|/|d + a F d| = sqrt((1 - 2ar + a^2 s^2)/(1 + 2ar + a^2 s^2))

with r = <d, F d>/|d|^2 and s = |F d|/|d|, least at a = 1/s = |d|/|F d|. The displacements of a run
are dominated by what converges slowly, so a |F d|/|d| = 1 on them means that neither a longer nor a
shorter step would help there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from wellposed.solve.solver import Point, Step

if TYPE_CHECKING:
    from wellposed.solve.splitting import AbstractSplitMap

#: Steps after which a reflection is judged, at the latest: enough for the slow directions to stand out.
PROBE_STEPS = 20
#: Displacements have fallen enough when they are this part of the first one; much smaller ones are rounding.
ENOUGH = 1e-4
#: Rounds of tuning, at most; each costs a factorization and PROBE_STEPS small steps.
ROUNDS = 6
#: A step size within this factor of the measured optimum stays: the number of steps is flat there.
GOOD_ENOUGH = 1.15

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


@dataclass(frozen=True)
class TunedStep:
    """As a `step_size`: found by measuring contraction, never by a trial that may diverge.

    `ForwardBackward(TunedStep())` gives every sample its own step, from its own last displacement.
    `PeacemanRachford` and `DouglasRachford` need one factorization for all samples, so they take
    one step size for all, measured on a small fixed probe problem with the same operator and prox.
    It depends on the parameters, not on the samples; while these change little it is measured ever
    more rarely, and the search begins with the one known. The adjoint takes that of the forward
    solve.

    Examples:
        >>> import torch, wellposed as wp
        >>> model = wp.MonotoneDEQ(4, 16, solver=wp.PeacemanRachford(wp.TunedStep()))
        >>> model.solve(torch.ones(2, 4)).status
        StatusArray(CONVERGED: 2)
    """


def minimal_residual(d: Tensor, Fd: Tensor, over: Tensor | float, longest: Tensor | float) -> tuple[Tensor, Tensor]:
    """(batch, 1) `over` times the best step along d, and its log factor; NaN where d = 0."""
    dot = torch.linalg.vecdot(d, Fd).unsqueeze(1)
    square = torch.linalg.vecdot(Fd, Fd).unsqueeze(1)
    a = torch.clamp(over * dot / square, max=longest)
    change = (a * square - 2 * dot) * a / torch.linalg.vecdot(d, d).unsqueeze(1)  # |d - a F d|^2/|d|^2 - 1
    return a, 0.5 * torch.log1p(change.clamp(min=-0.999))


def tune_reflection(f: AbstractSplitMap, start: float | None) -> float:
    """A step size for reflections at the operator of f.

    Args:
        f: The map.
        start: Where to begin, e.g. the step size of the parameters before; measured if not given.
    """
    probe = f.probe()
    if probe is None:
        return 1.0 if start is None else start
    with torch.no_grad():
        a = _initial(probe) if start is None else start
        seen: dict[float, float] = {}  # log of the ratio by log of the step size; falls, and is 0 at the optimum
        for _ in range(ROUNDS):
            ratio = _ratio(probe, a)
            if not 0 < ratio < math.inf:
                return a
            seen[math.log(a)] = math.log(ratio)
            if abs(math.log(ratio)) <= math.log(GOOD_ENOUGH):
                return a
            a = math.exp(_root(seen))
    return math.exp(min(seen, key=lambda x: abs(seen[x])))


def _root(seen: dict[float, float]) -> float:
    """Where the line through the nearest points of either sign is 0, or beyond the last point."""
    below = max((x for x, y in seen.items() if y > 0), default=None)
    above = min((x for x, y in seen.items() if y < 0), default=None)
    if below is None or above is None or above <= below:
        x = below if below is not None and above is None else above
        assert x is not None  # a ratio of 1 has ended the search
        return x + seen[x]
    part = seen[below] / (seen[below] - seen[above])
    return below + min(max(part, 0.1), 0.9) * (above - below)


def _initial(f: AbstractSplitMap) -> float:
    """|d|/|F d| along the constants c of the probe, read off f's own affine part."""
    c = f.affine_at_zero()
    return _mean_ratio(c, c - (f.affine(c) - c), 1.0)


def _ratio(f: AbstractSplitMap, a: float) -> float:
    """|d|/(a |F d|) of the last displacements of a short run: above 1 if a is too short."""
    u = z = torch.zeros_like(f.affine_at_zero())
    x_before = y_before = None
    ratios: list[float] = []
    first = 0.0
    for _ in range(PROBE_STEPS):
        reflected = 2 * z - u
        x = f.resolvent(reflected, a)
        y = (reflected - x) / a  # F x - c
        u = 2 * x - reflected
        z = f.prox(u, a)
        if x_before is not None and y_before is not None:
            d = x - x_before
            ratios.append(_mean_ratio(d, y - y_before, a))
            size = float(torch.linalg.vector_norm(d))
            first = first or size
            if not size > ENOUGH * first:
                break
        x_before, y_before = x, y
    finite = [r for r in ratios[-3:] if 0 < r < math.inf]
    return math.exp(sum(map(math.log, finite)) / len(finite)) if finite else math.nan


def _mean_ratio(d: Tensor, Fd: Tensor, a: float) -> float:
    """The geometric mean over samples of |d|/(a |F d|), of those that moved."""
    ratio = torch.linalg.vector_norm(d, dim=1) / (a * torch.linalg.vector_norm(Fd, dim=1))
    usable = ratio[ratio.isfinite() & (ratio > 0)]
    return float(usable.log().mean().exp()) if usable.numel() else 1.0


def begin_adaptive(split: AbstractSplitMap, point: Point) -> dict[str, Any]:
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


def adaptive_steps(state: dict[str, Any], split: AbstractSplitMap, point: Point) -> Step:
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
    """Continues with longer (or shorter) steps while they are faster, else turns round."""
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
    """Shorter steps for samples with too little progress; back to the best point if they grew."""
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
