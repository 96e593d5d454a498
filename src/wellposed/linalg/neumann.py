"""Neumann's series for a batch of systems."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.errors import InvalidArgument
from wellposed.linalg._linear_systems import LinearSystems
from wellposed.linalg.linear_solver import AbstractLinearSolver, LinearSolution, Matvec, keep_rows, row_norm

__all__ = ["Neumann"]


@dataclass(frozen=True)
class Neumann(AbstractLinearSolver):
    r"""Neumann's series: `x <- x + (b - A x)`, which for `A = I - J` is `x <- J x + b`.

    From zero, step `k` gives `x = b + J b + ... + J^(k-1) b`. Converges for every `b` if and only if the
    spectral radius of `J = I - A` is below 1 ([saad2003], Chapter 4), at that rate; a large `||J||` lets the
    residual grow first. Costs one product per step, which also measures the residual, and no memory.

    Args:
        growth_limit: A sample is `DIVERGED` when its residual exceeds its least one by this factor.
    """

    growth_limit: float = 1e4

    def __post_init__(self) -> None:
        if not self.growth_limit > 1.0:
            raise InvalidArgument(
                f"The 'growth_limit' parameter of Neumann must be a float > 1. Got {self.growth_limit!r} instead."
            )

    def __call__(
        self,
        matvec: Matvec,
        b: Tensor,
        x0: Tensor | None = None,
        *,
        rtol: float | Tensor = 1e-6,
        atol: float | Tensor = 0.0,
        max_steps: int | Tensor = 200,
    ) -> LinearSolution:
        """Solve `A_i x_i = b_i`; see `AbstractLinearSolver.__call__`."""
        systems = LinearSystems(matvec, b, x0, rtol=rtol, atol=atol, max_steps=max_steps)
        running = systems.settle(next_cost=1)
        x, r = systems.x, systems.r
        while running:
            # Rows that are done become zero, so that nothing goes on growing in them.
            x = keep_rows(systems.running, x + r)
            r = systems.b - systems.product(x, systems.running)
            norm = row_norm(r)
            systems.keep_better(x, norm)
            diverged = norm > self.growth_limit * systems.norm
            running = systems.settle(not_finite=~torch.isfinite(norm), diverged=diverged, next_cost=1)
        return systems.solution()
