"""Samples that plain steps led away in an earlier solve with the same Jacobian."""

from __future__ import annotations

import numpy as np
import torch

from wellposed._tree import Array, to_device, to_host
from wellposed.solve._samples import ActiveSamples, Outcome
from wellposed.solve.map import AbstractMap
from wellposed.solve.solver import AbstractSolver, AbstractSwitchingRule, Tolerance

#: A residual this many times the least one seen is divergence: in float32 no digit of the start is left.
GROWTH_LIMIT = 1e8
Stages = list[tuple[AbstractSolver, AbstractSwitchingRule | None]]


def leave_plain_steps_out(
    f: AbstractMap, samples: ActiveSamples, outcome: Outcome, stages: Stages, max_steps: int
) -> tuple[ActiveSamples | None, Stages]:
    """The samples that the first stage passes on at once, and the stages; the last if all.

    f is one plain step ahead of them. Krylov methods begin with the product that this takes, and so
    do plain steps of the others. It shows where entries of g vanish, as along a chain: there plain
    steps end, and Krylov methods stagnate.

    Args:
        f: An affine map whose `plain_factor` is known.
        samples: All, at the start.
        outcome: Gets an infinite `plain_factor` for what is passed on.
        stages: Of a solver whose first rule `leaves_start`; others are returned as they are.
        max_steps: Evaluations that a sample may take part in; too few leave no choice.
    """
    rule = stages[0][1]
    if f.plain_factor is None or rule is None or not rule.leaves_start or max_steps < 3:
        return None, stages
    samples.ahead = f(samples.fz)
    away = np.isinf(f.plain_factor) & ~to_host((samples.ahead == samples.fz).any(dim=1))
    outcome.plain_factor[away] = np.inf
    if away.all():
        samples.evaluations = samples.evaluations + 1
        return None, [(solver, rule) for solver, rule in stages if rule is None or not rule.leaves_start]
    if not away.any():
        return None, stages
    passed = samples.take(np.flatnonzero(away))
    passed.evaluations = passed.evaluations + 1
    return passed, stages


def went_astray(
    samples: ActiveSamples, r: Array, foretold: Array | bool, due: Array | None, idle: Array | None, max_steps: int
) -> Array | None:
    """(rows,) samples to be put back, or None if there are none.

    Plain steps of an affine map have led them too far to be of use, or they are `foretold`: the
    factor of a solve sent them where they are first measured now, and no residual has fallen. (A
    solve can begin, and stay, where the Jacobian contracts, and its backward pass cannot.)
    """
    away = ~(r <= GROWTH_LIMIT * samples.best_r) | (foretold & ~(r < samples.first_r))
    if not away.any():
        return None  # the usual case
    rows: Array = away & (samples.evaluations < max_steps) & np.isfinite(samples.best_r)
    rows &= (True if due is None else due) & (True if idle is None else ~idle)
    if rows.any():  # along a chain the residual may rise, while entries end one after the other
        rows &= ~to_host((samples.fz == samples.z).any(dim=1)) | ~(r <= GROWTH_LIMIT * samples.best_r)
    return rows if rows.any() else None


def return_to_best(
    f: AbstractMap, samples: ActiveSamples, away: Array | None, r: Array, s: Array, tolerance: Tolerance
) -> tuple[Array, Array, Array]:
    """Puts samples back to their best point, by one evaluation if there are any.

    Returns:
        (rows,) |f(z) - z|, NaN where f is not finite, |f(z)| and the target; given the first two.
    """
    if away is None:
        return r, s, tolerance.target(s)
    back = to_device(away, samples.z.device).unsqueeze(1)
    samples.z = torch.where(back, samples.best_z, samples.z)
    samples.fz = torch.where(back, f(samples.z), samples.fz)
    samples.evaluations = samples.evaluations + away
    lost = away & ~to_host(samples.fz.isfinite().all(dim=1))  # the Jacobian is not finite: that was no growth
    s = np.where(away, samples.best_s, s)
    return np.where(lost, np.nan, np.where(away, samples.best_r, r)).astype(r.dtype), s, tolerance.target(s)
