"""Samples that plain steps led away in an earlier solve with the same Jacobian."""

from __future__ import annotations

import numpy as np

from wellposed._tree import to_host
from wellposed.solve._samples import ActiveSamples, Outcome
from wellposed.solve.map import AbstractMap
from wellposed.solve.solver import AbstractSolver, AbstractSwitchingRule

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
