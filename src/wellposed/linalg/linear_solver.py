"""What every linear solver is and what it returns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.status import Status, StatusArray

__all__ = ["AbstractLinearSolver", "LinearSolution", "Matvec"]

Matvec = Callable[[Tensor], Tensor]
"""(batch, m) -> (batch, m), linear, row by row: row i of the result depends on row i of the argument only."""


@dataclass(frozen=True, eq=False)
class LinearSolution:
    """The answer of a linear solver to a batch of systems `A_i x_i = b_i`.

    Attributes:
        value: (batch, m) best `x` found; always finite, and never with a larger residual than `x0` or zero.
        residual: (batch,) `||b - A x|| / ||b||` measured at `value` by a product with `A`, not taken from a
            recurrence. 0 where `b` and `x` are zero; `inf` where `b` is not finite.
        num_steps: (batch,) int64, products with `A` in which the sample took part, measurements included.
        status: (batch,) how each sample ended.
    """

    value: Tensor
    residual: Tensor
    num_steps: Tensor
    status: StatusArray

    @property
    def converged(self) -> Tensor:
        """(batch,) bool: where the measured residual met the tolerance."""
        return self.status == Status.CONVERGED

    def __repr__(self) -> str:
        if not len(self.status):
            return "LinearSolution(empty batch)"
        worst, steps = float(self.residual.max()), int(self.num_steps.max())
        return f"LinearSolution({self.status!r}, largest residual {worst:.2e}, most steps {steps})"


class AbstractLinearSolver(ABC):
    """Solves a batch of linear systems given only products with their matrices."""

    @abstractmethod
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
        """Solve `A_i x_i = b_i` until `||b_i - A_i x_i|| <= max(rtol ||b_i||, atol)`, sample by sample.

        No graph is recorded, and no argument is changed. A failed solve is told by the status, never by an
        exception.

        Args:
            matvec: `(batch, m) -> (batch, m)`, the products `A_i v_i`. Rows of samples that are
                done are passed too, mostly as zero, and ignored.
            b: (batch, m) right-hand sides, float32 or float64.
            x0: (batch, m) first guess; zero if None, which saves a product. Samples for which it is worse
                than zero start at zero.
            rtol: Tolerance relative to `||b_i||`; a number, or (batch,) one for each sample.
            atol: Absolute tolerance on `||b_i - A_i x_i||`; a number, or (batch,).
            max_steps: Hard bound on the products in which a sample takes part, an integer >= 1; or (batch,),
                where samples with 0 or less stay at zero.
        """


def row_norm(v: Tensor) -> Tensor:
    """(batch,) Euclidean norms of the rows of `v` (batch, m)."""
    return torch.linalg.vector_norm(v, dim=1)


def row_dot(u: Tensor, v: Tensor) -> Tensor:
    """(batch,) inner products of the rows of `u` and `v`, both (batch, m)."""
    return torch.linalg.vecdot(u, v, dim=1)


def keep_rows(mask: Tensor, v: Tensor) -> Tensor:
    """`v` (batch, m) with zero, not 0 * NaN, in the rows where `mask` (batch,) is false."""
    return torch.where(mask.unsqueeze(1), v, 0.0)
