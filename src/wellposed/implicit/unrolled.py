"""Back through the loop: the reference that tests trust."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from wellposed.implicit._gradient import AbstractGradient, Context
from wellposed.solve import AbstractMap, Outcome, check_positive_integer, judge

__all__ = ["UnrolledGradient"]


@dataclass(frozen=True)
class UnrolledGradient(AbstractGradient):
    """Runs `steps` plain steps z <- f(z) from the start with a graph, and differentiates through all of them.

    The solver of the layer is not used: the value is that of the unrolled network, and its residual is measured (one more
    evaluation, without a graph), so that a depth too small for the tolerance shows in the status. Memory grows with `steps`.

    Args:
        steps: Depth.
    """

    steps: int

    def __post_init__(self) -> None:
        check_positive_integer("UnrolledGradient", "steps", self.steps)

    def run(
        self, f: AbstractMap, start: Tensor, solve: Callable[[Tensor], Outcome], context: Context
    ) -> tuple[Tensor, Outcome]:
        z = self.unroll(f, start)
        return z, judge(f, z.detach(), context.tolerance, self.steps + 1)

    def transformed(self, f: AbstractMap, start: Tensor, context: Context) -> Tensor:
        return self.unroll(f, start)

    def unroll(self, f: AbstractMap, z: Tensor) -> Tensor:
        """The steps, recorded."""
        for _ in range(self.steps):
            z = f.tracked(z)
        return z

    def attach(self, f: AbstractMap, outcome: Outcome, context: Context) -> Tensor:
        raise NotImplementedError("UnrolledGradient makes its own value; it attaches nothing to another.")
