"""The answer of a solve: a value, and the truth about it, sample by sample."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from wellposed.errors import InvalidArgument
from wellposed.linalg.rounding import round_up
from wellposed.status import Status, StatusArray

__all__ = ["Solution"]


@dataclass(frozen=True, eq=False)
class Solution:
    """What a solve found.

    Attributes:
        value: Same structure as the start, batch first. For a sample that failed, the best point it has seen (that of
            least |f(z) - z|). A float16 or bfloat16 start is solved in float32 and `value` is float32.
        residual: (batch,) |f(z) - z| / |f(z)|, measured at `value`.
        absolute_residual: (batch,) |f(z) - z|, measured at `value`.
        num_steps: (batch,) evaluations of f that each sample took part in, at most max_steps; a product with the Jacobian
            counts as one.
        status: (batch,) of `Status`.
        rate: (batch,) mean factor by which |f(z) - z| changed per evaluation; for `Picard` the measured contraction.
        history: (steps, batch) relative residual after each evaluation at which it was measured, NaN elsewhere; None
            unless asked for with `record=True`.
        note: What f, evaluated for the whole batch at `value`, showed beyond the numbers: that rows depend on each other, or
            that f is random. Mostly empty.
    """

    value: Any
    residual: Tensor
    absolute_residual: Tensor
    num_steps: Tensor
    status: StatusArray
    rate: Tensor
    history: Tensor | None = None
    note: str = ""

    @property
    def converged(self) -> Tensor:
        """(batch,) bool."""
        return self.status == Status.CONVERGED

    def error_bound(self, contraction: float | Tensor) -> Tensor:
        """(batch,) upper bound of |z - z*|, if f contracts with factor at most `contraction` < 1.

        Banach: |z - z*| <= |f(z) - z| / (1 - contraction), in the norm of all features of a sample together. The
        residual is computed in floating point; its own rounding, some eps |f(z)|, is not part of the bound. What
        follows from it is rounded upward.

        Args:
            contraction: An upper bound of the contraction factor of f, in [0, 1); one number, or one per sample.
        """
        residual = self.absolute_residual.double()
        factor = torch.as_tensor(contraction, dtype=torch.float64, device=residual.device)
        if not bool(((factor >= 0) & (factor < 1)).all()):
            raise InvalidArgument(
                f"error_bound needs a contraction factor in [0, 1); got {contraction}. "
                "Without contraction the residual alone does not bound the distance to an equilibrium."
            )
        # 1 - q is rounded by half a unit at most, and so is the quotient
        bound = residual / (1.0 - factor) * (1.0 + 2.0**-51)
        return round_up(bound, self.absolute_residual.dtype)

    def as_batch(self, shape: torch.Size) -> Solution:
        """The solution of one sample that is a whole batch, given to every row of it."""
        numbers = {
            name: getattr(self, name).expand(shape[0]) for name in ("residual", "absolute_residual", "num_steps", "rate")
        }
        status = StatusArray(self.status.codes.expand(shape[0]))
        return replace(self, value=self.value.reshape(shape), status=status, **numbers)

    def __repr__(self) -> str:
        worst = f"{float(self.residual.max()):.1e}" if len(self.status) else "none"
        most = int(self.num_steps.max()) if len(self.status) else 0
        return f"Solution({self.status!r}, residual <= {worst}, num_steps <= {most})"
