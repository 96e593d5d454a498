"""Gradients inside `torch.func` transforms: a tail of recorded steps at the equilibrium."""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor

from wellposed.errors import NotConverged, NotConvergedWarning, WellposedError
from wellposed.implicit._gradient import Context
from wellposed.solve import AbstractMap, TransformedOutcome, iterate_transformed

__all__ = ["solve_transformed", "with_tail"]

#: A map slower than this would need a tail too long to be called a derivative of the equilibrium.
SLOWEST_RATE = 0.99


def solve_transformed(f: AbstractMap, start: Tensor, context: Context) -> TransformedOutcome:
    """The equilibrium by plain iteration, under whatever transforms are active; applies the policy."""
    with torch.no_grad():
        outcome = iterate_transformed(f.tracked, start, tolerance=context.tolerance, max_steps=context.max_steps)
    report(outcome, context)
    return outcome


def report(outcome: TransformedOutcome, context: Context) -> None:
    """Raises or warns if samples failed and the policy says so."""
    if outcome.failed == 0 or context.on_failure == "ignore":
        return
    text = (
        f"inside torch.func transforms: {outcome.failed} of {outcome.total} samples did not converge; the worst has residual "
        f"{outcome.worst:.1e} > rtol={context.tolerance.rtol:.0e} after {outcome.steps} steps (max_steps={context.max_steps}). "
        "Only plain iteration works under transforms: raise max_steps, or make the map contract more."
    )
    if context.on_failure == "raise":
        raise NotConverged(text)
    warnings.warn(text, NotConvergedWarning, stacklevel=5)


def with_tail(f: AbstractMap, outcome: TransformedOutcome, context: Context) -> Tensor:
    r"""z* followed by k recorded plain steps, whose derivatives of every kind and order are those of the equilibrium.

    k recorded steps give sum_{i<k} J^i instead of (I - J)^-1: the part missing is of the order of q^k, with q the measured
    factor of the iteration. k is chosen so that q^k is below the tolerance, with half as many again for second derivatives.
    """
    q = outcome.rate
    if q >= SLOWEST_RATE:
        raise WellposedError(
            f"Inside torch.func transforms an equilibrium is differentiated by recorded plain steps, which needs a "
            f"contraction; the measured factor per step is {q:.3g}. Use torch.autograd (backward, grad) instead."
        )
    steps = 2 if q <= 0 else math.ceil(1.5 * math.log(context.tolerance.rtol + 1e-16) / math.log(max(q, 1e-3))) + 2
    z = outcome.value.detach()
    for _ in range(steps):
        z = f.tracked(z)
    return z
