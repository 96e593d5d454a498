"""Equilibria and their gradients inside `torch.func` transforms, by recorded steps.

Under `vmap` a tensor stands for many at once, under `grad` and `jvp` it carries a derivative. The
loop here uses operations that every transform supports: plain steps, finished samples held by
`where`, and a stop when all samples of all levels are done, read from the concrete values.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from wellposed._torch import concrete
from wellposed.errors import NotConverged, NotConvergedWarning, WellposedError
from wellposed.solve._samples import relative, scaled_norm
from wellposed.solve.loop import GROWTH_LIMIT
from wellposed.solve.map import AbstractMap
from wellposed.solve.solution import SolveOptions, user_level
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
    """

    value: Tensor
    failed: int
    total: int
    worst: float
    steps: int


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
    least: Tensor | None = None
    for steps in range(1, max_steps + 1):
        fz = f(z)
        r, s = scaled_norm(fz - z), scaled_norm(fz)
        finite = r.isfinite() & s.isfinite()
        done = ((r <= tolerance.rtol * s) | (r <= tolerance.atol)) & finite  # inf <= inf is not convergence
        least = r if least is None else torch.minimum(least, r)
        going = concrete(~done & finite & (r <= GROWTH_LIMIT * least))
        if steps == max_steps or not bool(going.any()):
            break
        z = torch.where(done.unsqueeze(1), z, fz)
    finished = concrete(done)
    residual = concrete(relative(r, s)).detach()
    failed = int((~finished).sum())
    worst = float(residual[~finished].nan_to_num(torch.inf).max()) if failed else 0.0
    return TransformedOutcome(z, failed, finished.numel(), worst, steps)


def solve_transformed(f: AbstractMap, start: Tensor, options: SolveOptions) -> TransformedOutcome:
    """The equilibrium by plain iteration, under the active transforms; applies the policy."""
    with torch.no_grad():
        outcome = iterate_transformed(f.tracked, start, tolerance=options.tolerance, max_steps=options.max_steps)
    report(outcome, options)
    return outcome


def report(outcome: TransformedOutcome, options: SolveOptions) -> None:
    """Raises or warns if samples failed and the policy says so."""
    if outcome.failed == 0 or options.on_failure == "ignore":
        return
    text = (
        f"inside torch.func transforms: {outcome.failed} of {outcome.total} samples did not converge; the worst has residual "
        f"{outcome.worst:.1e} > rtol={options.tolerance.rtol:.0e} after {outcome.steps} steps (max_steps={options.max_steps}). "
        "Only plain iteration works under transforms: raise max_steps, or make the map contract more."
    )
    if options.on_failure == "raise":
        raise NotConverged(text)
    warnings.warn(text, NotConvergedWarning, stacklevel=user_level())


def with_tail(f: AbstractMap, outcome: TransformedOutcome, rtol: float) -> Tensor:
    r"""z* and k recorded plain steps, whose derivatives are those of the equilibrium.

    k recorded steps give sum_{i<k} J^i instead of (I - J)^-1: J^k (I - J)^-1 is missing. k is
    chosen so that J^k is below the tolerance, with half as many steps again for second derivatives.
    """
    z = outcome.value.detach()
    for _ in range(_tail_length(f, z, rtol)):
        z = f.tracked(z)
    return z


def _tail_length(f: AbstractMap, z: Tensor, rtol: float) -> int:
    r"""The k at which |J^k| <= rtol, measured on J at z: a start may be the equilibrium.

    With w_1, ..., w_r Gaussian, |J^k| <= 10 sqrt(2/pi) max_i |J^k w_i| except with probability
    10^-r [halko2011, Lemma 4.1]. The vectors depend on z, so that none is orthogonal to the slow
    directions of every map.
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
