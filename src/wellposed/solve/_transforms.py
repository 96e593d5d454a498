"""Solving inside `torch.func` transforms, where tensors carry levels and decisions cannot depend on one sample's value.

Under `vmap` a tensor stands for many at once, under `grad` and `jvp` it carries a derivative. The loop here uses operations
that every transform understands: plain steps, finished samples held by `where`, and a stop when all samples of all levels are
done, read from the values underneath.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.solve._map import differs
from wellposed.solve._outcome import Tolerance, relative, scaled_norm
from wellposed.solve._random import RANDOM, UNREPEATED, random_state, watched
from wellposed.solve.loop import GROWTH_LIMIT

__all__ = ["TransformedOutcome", "concrete", "draws_again", "iterate_transformed", "transforms_active"]


def transforms_active() -> bool:
    """Whether this runs inside a transform of `torch.func`, or a level of forward-mode automatic differentiation."""
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0


def concrete(tensor: Tensor) -> Tensor:
    """The values underneath all transforms; what `vmap` added is one more dimension."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


@dataclass
class TransformedOutcome:
    """What is known after a solve inside transforms.

    Attributes:
        value: (batch, features) as the transforms see it.
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
    least: Tensor | None = None
    most = max_steps
    for steps in range(1, max_steps + 1):
        before = random_state(z.device)
        fz = f(z)
        changed = not torch.equal(before, random_state(z.device))
        if steps == 1 and changed:
            most = max(max_steps - 1, 1)  # one evaluation is left to find out whether f draws
        r, s = scaled_norm(fz - z), scaled_norm(fz)
        finite = r.isfinite() & s.isfinite()
        done = ((r <= tolerance.rtol * s) | (r <= tolerance.atol)) & finite  # inf <= inf is no convergence
        least = r if least is None else torch.minimum(least, r)
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
    """A sentence if f, evaluated at z once more, draws random numbers or gives another value than fz; else nothing."""
    again, drawn = watched(f, z)
    return RANDOM if drawn or bool(concrete(differs(again, fz)).any()) else ""
