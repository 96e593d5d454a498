"""Linear systems solved by forming their matrices."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.linalg._linear_systems import LinearSystems, check_arguments
from wellposed.linalg.direct import batched_solve_ex
from wellposed.linalg.linear_solver import AbstractLinearSolver, LinearSolution, Matvec

__all__ = ["Dense"]

_UNLIMITED = 2**62


@dataclass(frozen=True)
class Dense(AbstractLinearSolver):
    """Form each `A_i` from its products with the unit vectors, and solve by LU: the reference for the others.

    Costs `m` products, and one to measure the residual, whatever `max_steps` is; `2/3 m^3` operations and
    `m^2` numbers per sample. For tests and for small `m`.

    A singular matrix ends in `DIVERGED`, one with NaN or infinite entries in `NOT_FINITE`, and a solution
    whose residual misses the tolerance (ill-conditioned, or a tolerance below rounding) in `MAX_STEPS`.
    """

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
        """Solve `A_i x_i = b_i`; see `AbstractLinearSolver.__call__`, except that `max_steps` is not used."""
        check_arguments(matvec, b, x0, rtol=rtol, atol=atol, max_steps=max_steps)
        systems = LinearSystems(matvec, b, x0, rtol=rtol, atol=atol, max_steps=_UNLIMITED)
        if systems.settle():
            A = _matrices(systems)
            finite = torch.isfinite(A).all(dim=2).all(dim=1)
            # LAPACK is not defined on NaN; the identity stands in, and the sample is marked.
            identity = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
            d, info = batched_solve_ex(torch.where(finite[:, None, None], A, identity), systems.r)
            systems.correct(d, ~finite)
            systems.settle(diverged=info > 0, next_cost=_UNLIMITED)
        return systems.solution()


def _matrices(systems: LinearSystems) -> Tensor:
    """(batch, m, m), one product per column."""
    batch, m = systems.b.shape
    columns = systems.b.new_empty(m, batch, m)
    for j in range(m):
        unit = systems.b.new_zeros(batch, m)
        unit[:, j] = 1.0
        columns[j] = systems.product(unit, systems.running)
    return columns.permute(1, 2, 0)
