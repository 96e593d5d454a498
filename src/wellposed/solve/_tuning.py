r"""Step sizes from measured contraction.

Both rules look at a displacement d of the iteration and at F d, F = I - W, which the iteration knows without a product.

*Forward-backward.* Along d the factor of a step a is |d - a F d|/|d|, least at a = <d, F d>/|F d|^2, the minimal-residual step.
It is at least m/L^2, the certified step size, whatever m and L are, because <d, F d> >= m |d|^2 and |F d| <= L |d|. The
steps taken are `over` times as long, 1 <= over < 2: along d that is a contraction still, and the slow directions, hidden below
the fast ones, often want longer steps. `over` is moved up or down by what a sample has measured of its residual.

*Reflections.* Peaceman-Rachford converges for every a > 0. On d' = (I + aF) d its affine reflection has the factor

    |d - a F d|/|d + a F d| = sqrt((1 - 2ar + a^2 s^2)/(1 + 2ar + a^2 s^2)),   r = <d, F d>/|d|^2,  s = |F d|/|d|

least at a = 1/s = |d|/|F d|. The displacements of a run are dominated by what converges slowly, so a |F d|/|d| = 1 on them
means that neither a longer nor a shorter step would help there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from wellposed.solve.splitting import AbstractSplitMap

__all__ = ["TunedStep", "minimal_residual", "tune_reflection"]

#: Steps after which a reflection is judged, at the latest: enough for the slow directions to stand out.
PROBE_STEPS = 20
#: Displacements have fallen enough when they are this part of the first one; much smaller ones are rounding.
ENOUGH = 1e-4
#: Rounds of tuning, at most; each costs a factorization and PROBE_STEPS small steps.
ROUNDS = 6
#: A step size within this factor of the measured optimum stays: the number of steps is flat there.
GOOD_ENOUGH = 1.15


@dataclass(frozen=True)
class TunedStep:
    """As a `step_size`: found by measuring contraction, never by a trial that may diverge.

    `ForwardBackward(TunedStep())` gives every sample its own step, from its own last displacement. `PeacemanRachford` and
    `DouglasRachford` need one factorization for all samples, so they take one step size for all, measured on a small fixed
    probe problem with the same operator and prox. It depends on the parameters, not on the samples; while these change
    little it is measured ever more rarely, and the search begins with the one known. The adjoint takes that of the forward
    solve.
    """


def minimal_residual(d: Tensor, Fd: Tensor, over: Tensor | float, longest: Tensor | float) -> tuple[Tensor, Tensor]:
    """(batch, 1) `over` times the step of least factor along d, at most `longest`, and its log factor; NaN where d = 0."""
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
    """Where the line through the nearest point of either sign is 0; beyond the last point, if all have one sign."""
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
    """|d|/(a |F d|) of the last displacements of a short run with step size a: above 1 if a is too short."""
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
