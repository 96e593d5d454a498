"""Backtracking, each sample with its own step length."""

from __future__ import annotations

import torch
from torch import Tensor

from wellposed.solve._map import AbstractMap, RowsCoupled
from wellposed.solve.solver import Point, Step

__all__ = ["backtrack"]


def backtrack(f: AbstractMap, point: Point, direction: Tensor, *, accept: Tensor, halvings: int, used: Tensor) -> Step:
    """Tries z + t direction for t = 1, 1/2, 1/4, ... until |f(z) - z| <= accept; keeps the best try if none is accepted.

    Only samples that still search take part in an evaluation, and none beyond its budget.

    Args:
        f: The map.
        point: Where the search starts.
        direction: (batch, features).
        accept: (batch,) the |f(z) - z| that ends a sample's search.
        halvings: How often t is halved at most.
        used: (batch,) evaluations that were spent on finding the direction.
    """
    z = point.z + direction
    fz = _evaluate(f, z, used)
    r = torch.linalg.vector_norm(fz - z, dim=1)
    used = used + 1
    t = 1.0
    for _ in range(halvings):
        rows = (~(r <= accept) & (used < point.budget)).nonzero().squeeze(1)
        if rows.shape[0] == 0:
            break
        t *= 0.5
        z_try = torch.add(point.z[rows], direction[rows], alpha=t)
        f_try = _evaluate(f.take(rows), z_try, used)
        r_try = torch.linalg.vector_norm(f_try - z_try, dim=1)
        used = used.index_add(0, rows, torch.ones_like(rows))
        better = (r_try < r[rows]) | ~r[rows].isfinite()
        z = z.index_copy(0, rows[better], z_try[better])
        fz = fz.index_copy(0, rows[better], f_try[better])
        r = r.index_copy(0, rows[better], r_try[better])
    return Step(z, fz, used)


def _evaluate(f: AbstractMap, z: Tensor, used: Tensor) -> Tensor:
    """f(z); if that shows that rows depend on each other, with the evaluations that the step has used before."""
    try:
        return f(z)
    except RowsCoupled as found:
        found.within = int(used.max())
        raise
