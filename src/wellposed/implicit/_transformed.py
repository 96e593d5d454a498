"""Gradients inside `torch.func` transforms: a tail of recorded steps at the equilibrium."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from wellposed.errors import (
    AdjointNotConverged,
    AdjointNotConvergedWarning,
    NotConverged,
    NotConvergedWarning,
    WellposedError,
)
from wellposed.implicit._gradient import Context
from wellposed.solve import AbstractMap, TransformedOutcome, concrete, iterate_transformed, user_level
from wellposed.solve._random import random_state
from wellposed.solve._transforms import draws_again

__all__ = ["solve_transformed", "with_tail"]

#: A map slower than this would need a tail too long to be called a derivative of the equilibrium.
SLOWEST_RATE = 0.99
#: Products beyond this are called divergence; probes have entries of size 1.
GROWTH_LIMIT = 1e8
#: Probes of the norm of J^k: it is bounded but with probability 10^-PROBES.
PROBES = 6


def solve_transformed(f: AbstractMap, start: Tensor, context: Context) -> TransformedOutcome:
    """The equilibrium by plain iteration, under whatever transforms are active; applies the policy."""
    with torch.no_grad():
        outcome = iterate_transformed(f.tracked, start, tolerance=context.tolerance, max_steps=context.max_steps)
    report(outcome, context)
    return outcome


def report(outcome: TransformedOutcome, context: Context, *, backward: bool = False) -> None:
    """Counts samples that failed as one failure, and raises or warns if the policy says so, as for any other solve."""
    if outcome.failed == 0:
        return
    cause = f"{'backward' if backward else 'forward'} inside torch.func"
    if outcome.note:
        cause += f", {outcome.note.partition(':')[0]}"
    context.counts[cause] += 1
    if context.on_failure == "ignore":
        return
    text = f"inside torch.func transforms: {outcome.failed} of {outcome.total} samples did not converge"
    if backward:
        text = f"backward of the equilibrium {text}, and their gradients are NaN"
    text += (
        f". {outcome.note}"
        if outcome.note
        else (
            f"; the worst has residual {outcome.worst:.1e} > rtol={context.tolerance.rtol:.0e} after {outcome.steps} steps "
            f"(max_steps={context.max_steps}). Only plain iteration works under transforms: raise max_steps, or make the map "
            "contract more."
        )
    )
    if context.on_failure == "raise":
        raise (AdjointNotConverged if backward else NotConverged)(text)
    warnings.warn(text, AdjointNotConvergedWarning if backward else NotConvergedWarning, stacklevel=user_level())


def with_tail(f: AbstractMap, outcome: TransformedOutcome, context: Context) -> Tensor:
    r"""z* followed by k recorded plain steps, whose derivatives of every kind and order are those of the equilibrium.

    k recorded steps give sum_{i<k} J^i instead of (I - J)^-1: the part missing is J^k (I - J)^-1. k is chosen so that J^k is
    below the tolerance, with half as many steps again for second derivatives.
    """
    z = outcome.value.detach()
    length = _tail_length(f, z, context.tolerance.rtol)
    before = random_state(z.device)
    for _ in range(length):
        z = f.tracked(z)
    if not outcome.note and not torch.equal(before, random_state(z.device)):  # f may draw where a graph is recorded only
        note = draws_again(f.tracked, z, f.tracked(z))
        report(replace(outcome, failed=outcome.total if note else 0, note=note), context)
    return z


def _tail_length(f: AbstractMap, z: Tensor, rtol: float) -> int:
    r"""The k at which |J^k| <= rtol, measured on J itself at z: how fast the iteration came there says nothing of a sample that
    began at its equilibrium.

    With w_1, ..., w_r Gaussian, |J^k| <= 10 sqrt(2/pi) max_i |J^k w_i| but with probability 10^-r [halko2011, Lemma 4.1]. The
    vectors depend on z, so that none is orthogonal to the slow directions of every map.
    """
    if z.numel() == 0:
        return 1
    with torch.no_grad():
        transposed = torch.func.vjp(f.tracked, z)[1]
        probes = _gaussian(z)
        target = (rtol + torch.finfo(z.dtype).eps) / (10 * math.sqrt(2 / math.pi))
        limit = math.ceil(math.log(target) / math.log(SLOWEST_RATE))
        largest = 1.0
        for k in range(1, limit + 1):
            (probes,) = torch.func.vmap(transposed)(probes)
            largest = float(concrete(torch.linalg.vector_norm(probes.flatten(1), dim=1)).max())
            if largest <= target:
                return math.ceil(1.5 * k) + 2
            if not largest < GROWTH_LIMIT:
                break
    raise WellposedError(
        "Inside torch.func transforms an equilibrium is differentiated by recorded plain steps, which needs a contraction; "
        f"J^T, the Jacobian of the cell at the equilibrium, changes a vector by a factor of {largest ** (1 / k):.3g} per "
        "step. Use torch.autograd (backward, grad) instead."
    )


def _gaussian(z: Tensor) -> Tensor:
    """(PROBES, batch, features) drawn by numpy, since transforms forbid torch to draw."""
    total = float(concrete(z.detach()).double().abs().sum())
    seed = abs(hash(total)) % 2**32 if math.isfinite(total) else 0
    draws = np.random.default_rng(seed).standard_normal((PROBES, *z.shape))
    return torch.zeros_like(z) + torch.as_tensor(draws, dtype=z.dtype, device=z.device)
