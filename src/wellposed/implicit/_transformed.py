"""Equilibria and their gradients inside `torch.func` transforms, by recorded steps.

Under `vmap` a tensor stands for many at once, under `grad` and `jvp` it carries a derivative. The
loop here uses operations that every transform supports: plain steps, finished samples held by
`where`, and a stop when all samples of all levels are done, read from the concrete values.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from wellposed._torch import apart, concrete, random_state, watched
from wellposed._tree import differs, relative, scaled_norm
from wellposed.errors import (
    AdjointNotConverged,
    AdjointNotConvergedWarning,
    NotConverged,
    NotConvergedWarning,
    WellposedError,
)
from wellposed.solve._closing import RANDOM, UNREPEATED
from wellposed.solve._failure import user_level
from wellposed.solve._samples import ran_away
from wellposed.solve.loop import GROWTH_LIMIT
from wellposed.solve.map import AbstractMap
from wellposed.solve.solution import SolveOptions
from wellposed.solve.solver import Tolerance

#: A map slower than this would need a tail too long to be called a derivative of the equilibrium.
SLOWEST_RATE = 0.99
#: Probes of the norm of J^k: the bound holds except with probability 10^-PROBES.
PROBES = 6


@dataclass
class TransformedOutcome:
    """The result of a solve inside transforms.

    Attributes:
        value: (batch, features) on the levels of the transforms.
        failed, total: Number of samples, over all levels.
        worst: Largest relative residual among those that failed; 0 if none did.
        steps: Evaluations.
        done: (batch,) which samples have converged, as the transforms see it.
        note: Why no sample has, if f draws random numbers: a sentence, else empty.
    """

    value: Tensor
    failed: int
    total: int
    worst: float
    steps: int
    done: Tensor
    note: str = ""


def iterate_transformed(
    f: Callable[[Tensor], Tensor], z: Tensor, *, tolerance: Tolerance, max_steps: int
) -> TransformedOutcome:
    """Plain iteration z <- f(z) with finished samples held.

    Args:
        f: Row-wise function of (batch, features).
        z: (batch, features) the start.
        tolerance: When a sample is done.
        max_steps: Evaluations at most.
    """
    seen: tuple[Tensor, Tensor, Tensor] | None = None  # the least and the largest r, and the first s
    most, eps = max_steps, torch.finfo(z.dtype).eps
    for steps in range(1, max_steps + 1):
        before = random_state(z.device)
        fz = f(z)
        changed = not torch.equal(before, random_state(z.device))
        if steps == 1 and changed:
            most = max(max_steps - 1, 1)  # one evaluation is left to find out whether f draws
        r, s = scaled_norm(fz - z), scaled_norm(fz)
        finite = r.isfinite() & s.isfinite()
        done = ((r <= tolerance.rtol * s) | (r <= tolerance.atol)) & finite  # inf <= inf is not convergence
        least, most_r, first_s = (r, r, s) if seen is None else (torch.minimum(seen[0], r), torch.maximum(seen[1], r), seen[2])
        seen = least, most_r, first_s
        if bool(concrete(done).any()):
            done = done & ~ran_away(r, s, first_s, most_r, tolerance.atol, eps)
        going = concrete(~done & finite & (r <= GROWTH_LIMIT * least))
        if steps == most or not bool(going.any()):
            break
        z = torch.where(done.unsqueeze(1), z, fz)
    note = ""
    if changed:
        note = UNREPEATED if steps == max_steps else draws_again(f, z, fz)
        steps = min(steps + 1, max_steps)
    if note:
        done = torch.zeros_like(done)
    finished = concrete(done)
    residual = concrete(relative(r, s)).detach()
    failed = int((~finished).sum())
    worst = float(residual[~finished].nan_to_num(torch.inf).max()) if failed else 0.0
    return TransformedOutcome(z, failed, finished.numel(), worst, steps, done, note)


def draws_again(f: Callable[[Tensor], Tensor], z: Tensor, fz: Tensor) -> str:
    """A sentence if f, evaluated at z again, draws random numbers or does not give fz; else ""."""
    again, drawn = watched(f, z)
    return RANDOM if drawn or bool(concrete(differs(again, fz)).any()) else ""


def solve_transformed(f: AbstractMap, start: Tensor, options: SolveOptions) -> TransformedOutcome:
    """The equilibrium by plain iteration, under the active transforms; applies the policy."""
    with torch.no_grad(), apart():
        outcome = iterate_transformed(f.tracked, start, tolerance=options.tolerance, max_steps=options.max_steps)
    report(outcome, options)
    return outcome


def report(outcome: TransformedOutcome, options: SolveOptions, *, backward: bool = False) -> None:
    """Counts samples that failed as one failure, and raises or warns if the policy says so.

    Args:
        outcome: Of the solve.
        options: Those of the solve.
        backward: Whether it was the linear system of a backward pass.
    """
    if outcome.failed == 0:
        return
    if options.record is not None:
        cause = f"{'backward' if backward else 'forward'} inside torch.func"
        options.record.failures[f"{cause}, {outcome.note.partition(':')[0]}" if outcome.note else cause] += 1
    if options.on_failure == "ignore":
        return
    text = f"inside torch.func transforms: {outcome.failed} of {outcome.total} samples did not converge"
    if backward:
        text = f"backward of the equilibrium {text}, and their gradients are NaN"
    if outcome.note:
        text += f". {outcome.note}"
    else:
        above = f"> rtol={options.tolerance.rtol:.0e}"
        above = above if outcome.worst > options.tolerance.rtol else "only because |f(z)| has grown,"
        text += (
            f"; the worst has residual {outcome.worst:.1e} {above} after {outcome.steps} steps "
            f"(max_steps={options.max_steps}). Only plain iteration works under transforms: raise max_steps, or make the map "
            "contract more."
        )
    if options.on_failure == "raise":
        raise (AdjointNotConverged if backward else NotConverged)(text)
    warnings.warn(text, AdjointNotConvergedWarning if backward else NotConvergedWarning, stacklevel=user_level())


def with_tail(f: AbstractMap, outcome: TransformedOutcome, options: SolveOptions) -> Tensor:
    r"""z* and k recorded plain steps, whose derivatives are those of the equilibrium.

    k recorded steps give sum_{i<k} J^i instead of (I - J)^-1: J^k (I - J)^-1 is missing. k is
    chosen so that J^k is below the tolerance, with half as many steps again for second derivatives.
    """
    z = outcome.value.detach()
    length = _tail_length(f, z, options.tolerance.rtol)
    before = random_state(z.device)
    for _ in range(length):
        z = f.tracked(z)
    if not outcome.note and not torch.equal(before, random_state(z.device)):  # f may draw only where a graph is recorded
        note = draws_again(f.tracked, z, f.tracked(z))
        report(replace(outcome, failed=outcome.total if note else 0, note=note), options)
    return z


def _tail_length(f: AbstractMap, z: Tensor, rtol: float) -> int:
    r"""The k at which |J^k| <= rtol, measured on J at z: a start may be the equilibrium.

    With w_1, ..., w_r Gaussian, |J^k| <= 10 sqrt(2/pi) max_i |J^k w_i| except with probability
    10^-r [halko2011, Lemma 4.1]. The vectors depend on z, so that none is orthogonal to the slow
    directions of every map.
    """
    if z.numel() == 0:
        return 1
    with torch.no_grad(), apart():
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
            if not largest < GROWTH_LIMIT:  # probes have entries of size 1
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
