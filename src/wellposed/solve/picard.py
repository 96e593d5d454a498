"""Damped fixed-point iteration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from wellposed.solve._map import AbstractMap
from wellposed.solve.solver import AbstractSolver, Point, Step, check_interval

__all__ = ["Picard"]


@dataclass(frozen=True)
class Picard(AbstractSolver):
    r"""Fixed-point iteration z <- (1 - damping) z + damping f(z).

    With damping 1 (the default, no damping) it converges from anywhere when f contracts, at the rate of its contraction
    factor. A damping below 1 also handles maps whose Jacobian has eigenvalues with real part below 1 and modulus above.
    Costs one evaluation of f a step and no memory.

    Args:
        damping: In (0, 1].
    """

    uses_spare: ClassVar[bool] = True
    damping: float = 1.0

    def __post_init__(self) -> None:
        check_interval("Picard", "damping", self.damping, low=0.0, high=1.0)

    @property
    def is_plain(self) -> bool:
        return self.damping == 1.0

    def init(self, f: AbstractMap, point: Point) -> None:
        return None

    def step(self, state: None, f: AbstractMap, point: Point) -> Step:
        if self.damping == 1.0:
            z = point.fz
        else:
            z = torch.add(point.z, point.g, alpha=self.damping)
        return Step(z, f(z, out=point.spare))
