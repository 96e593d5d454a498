"""Conjugates of smooth convex functions by Newton's method, for a batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from wellposed.convex.prox import value_range
from wellposed.convex.stages import Unit
from wellposed.errors import NotConverged
from wellposed.linalg.direct import batched_solve

__all__ = ["Conjugate", "conjugate_by_newton"]

MAX_STEPS = 200


@dataclass(frozen=True)
class Conjugate:
    """Theta*(y) = sup_v <y, v> - Theta(v).

    Attributes:
        value: (n,) infinite where y is outside the domain of Theta*.
        argument: (n, m) the maximising v, for which grad Theta(v) = y; NaN where there is none.
    """

    value: Tensor
    argument: Tensor


def conjugate_by_newton(unit: Unit, theta: Callable[[Tensor], Tensor], y: Tensor, *, mu: float) -> Conjugate:
    r"""Maximises <y, v> - Theta(v), where grad Theta is the unit f, by damped semi-smooth Newton steps [qi1993].

    The Hessian scale W^T D W + keep I is at least keep = 1 - a; for a = 1 it may be singular and a multiple of the identity
    that vanishes with the gradient is added. A sample that does not converge is asked whether y can be reached at all, by a
    bounded least-squares problem for y = W^T w/mu with w in the range of s: if not, Theta*(y) is infinite.

    Args:
        unit: f = grad Theta, with a matrix W (h, m).
        theta: (n, m) -> (n,) Theta.
        y: (n, m).
        mu: As in the unit: scale = (1 - keep)/mu.

    Raises:
        NotConverged: y can be reached, but Newton's method did not get there.
    """
    W = unit.operator.tensor
    identity = torch.eye(W.shape[1], dtype=W.dtype, device=W.device)
    eps = torch.finfo(y.dtype).eps
    goal = 64 * eps * math.sqrt(W.shape[1])
    v = y.clone()
    objective = (y * v).sum(dim=1) - theta(v)
    for _ in range(MAX_STEPS):
        hidden = unit.hidden(v)
        g = y - (unit.scale * unit.operator.transpose(hidden) + unit.keep * v)
        size = torch.linalg.vector_norm(g, dim=1)
        scale = torch.linalg.vector_norm(y, dim=1) + unit.keep * torch.linalg.vector_norm(v, dim=1)
        active = size > goal * scale.clamp(min=torch.finfo(y.dtype).tiny)
        if not bool(active.any()):
            break
        slope = unit.activation.slope(hidden)
        D = torch.ones_like(hidden) if slope is None else slope
        H = unit.scale * torch.einsum("hi,nh,hj->nij", W, D, W) + unit.keep * identity
        if unit.keep == 0.0:
            H = H + (size.clamp(max=1e-2) * 1e-2 + eps).view(-1, 1, 1) * identity
        direction = batched_solve(H, g)
        v, objective, moved = _line_search(y, v, direction, g, objective, theta, active)
        if not bool(moved.any()):
            break
    hidden = unit.hidden(v)
    missed = torch.linalg.vector_norm(y - (unit.scale * unit.operator.transpose(hidden) + unit.keep * v), dim=1)
    scale = torch.linalg.vector_norm(y, dim=1) + unit.keep * torch.linalg.vector_norm(v, dim=1)
    failed = ~(missed <= 1e-8 * scale)
    outside = torch.zeros_like(failed)
    for i in torch.nonzero(failed).flatten().tolist():
        if unit.keep > 0.0 or _reachable(unit, y[i], mu):
            raise NotConverged(
                f"The conjugate of a unit layer was not found for sample {i}: after {MAX_STEPS} Newton steps the gradient is "
                f"{float(missed[i]):.1e}. Points at the border of the domain are hard; try one slightly inside."
            )
        outside[i] = True
    value = torch.where(outside, math.inf, objective)
    return Conjugate(value, torch.where(outside.unsqueeze(1), math.nan, v))


def _line_search(
    y: Tensor,
    v: Tensor,
    direction: Tensor,
    g: Tensor,
    objective: Tensor,
    theta: Callable[[Tensor], Tensor],
    active: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Halves the step of each sample until <y, v> - Theta(v) has grown enough (Armijo); samples that cannot move stay."""
    ascent = (g * direction).sum(dim=1)
    rounding = 64 * torch.finfo(y.dtype).eps * objective.abs()
    step = active.to(y.dtype)
    moved = torch.zeros_like(active)
    for _ in range(40):
        trial = v + step.unsqueeze(1) * direction
        value = (y * trial).sum(dim=1) - theta(trial)
        good = active & ~moved & (value >= objective + 1e-4 * step * ascent - rounding)
        v = torch.where(good.unsqueeze(1), trial, v)
        objective = torch.where(good, value, objective)
        moved |= good
        if bool((moved | ~active).all()):
            break
        step = torch.where(moved, step, step / 2)
    return v, objective, moved


def _reachable(unit: Unit, y: Tensor, mu: float) -> bool:
    """Whether y = W^T w/mu for some w in the closed range of the activation."""
    from scipy.optimize import lsq_linear  # here: SciPy takes longer to import than the library

    W = unit.operator.tensor.double().cpu().numpy()
    low, high = value_range(unit.activation)
    target = mu * y.double().cpu().numpy()
    if math.isinf(low) and math.isinf(high):
        missed = W.T @ np.linalg.lstsq(W.T, target, rcond=None)[0] - target
    else:
        missed = lsq_linear(W.T, target, bounds=(low, high), tol=1e-13, method="bvls").fun
    return bool(np.linalg.norm(missed) <= 1e-7 * np.linalg.norm(target))
