"""Splitting methods for monotone equilibria: z = prox(W z + c) with I - W strongly monotone.

They ask the map for what they need (an affine part, a resolvent, a proximal operator), not for a network.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wellposed.errors import InvalidArgument, InvalidType
from wellposed.solve._map import AbstractMap
from wellposed.solve._solver import AbstractSolver, Point, Step, check_interval

__all__ = ["AbstractSplitMap", "DouglasRachford", "ForwardBackward", "PeacemanRachford"]


class AbstractSplitMap(AbstractMap):
    """f(z) = prox_1(W z + c): an affine operator followed by a proximal operator of some convex potential."""

    @abc.abstractmethod
    def affine(self, z: Tensor) -> Tensor:
        """W z + c."""

    @abc.abstractmethod
    def resolvent(self, v: Tensor, step_size: float) -> Tensor:
        """The z solving z + step_size ((I - W) z - c) = v."""

    @abc.abstractmethod
    def prox(self, v: Tensor, step_size: float) -> Tensor:
        """The proximal operator of step_size times the potential."""

    @abc.abstractmethod
    def monotonicity(self) -> tuple[float, float]:
        """(m, L): a lower bound of the least eigenvalue of sym(I - W) and an upper bound of |I - W|."""


def _as_split(f: AbstractMap, solver: str, z: Tensor) -> AbstractSplitMap:
    if not isinstance(f, AbstractSplitMap):
        raise InvalidType(
            f"{solver} needs a map that knows its resolvent and prox, such as an EquilibriumLayer over DenseCell(ReLU()); "
            "a plain function has neither. Use Auto(), Anderson() or NewtonKrylov() for it."
        )
    return f


@dataclass(frozen=True)
class ForwardBackward(AbstractSolver):
    r"""z <- prox_a(z - a ((I - W) z - c)), [winston2020].

    With I - W >= m and |I - W| <= L the factor is at most sqrt(1 - 2 a m + a^2 L^2), below 1 for a in the *open* interval
    (0, 2m/L^2) and least at a = m/L^2 ([nguyen2022] prints the interval closed in one place; at its end the factor is 1).
    Costs one product a step, which also gives the residual.

    Args:
        step_size: a. None takes m/L^2 from the map's own rigorous bounds, and refuses a map that is not monotone.
    """

    step_size: float | None = None

    def __post_init__(self) -> None:
        if self.step_size is not None:
            check_interval("ForwardBackward", "step_size", self.step_size, low=0.0)

    def init(self, f: AbstractMap, point: Point) -> dict[str, Any]:
        split = _as_split(f, "ForwardBackward", point.z)
        if self.step_size is not None:
            return {"step_size": self.step_size}
        m, L = split.monotonicity()
        if m <= 0:
            raise InvalidArgument(
                f"ForwardBackward() found no certified step size: sym(I - W) >= m holds only with m = {m:.3g}, and m must be "
                "positive. Give the cell a monotone parametrization, or choose step_size yourself."
            )
        return {"step_size": m / L**2}

    def step(self, state: dict[str, Any], f: AbstractMap, point: Point) -> Step:
        split = _as_split(f, "ForwardBackward", point.z)
        a = state["step_size"]
        affine = state.pop("affine", None)
        affine = split.affine(point.z) if affine is None else affine
        z = split.prox(torch.lerp(point.z, affine, a) if a != 1 else affine, a)
        state["affine"] = split.affine(z)
        return Step(z, split.prox(state["affine"], 1.0))


@dataclass(frozen=True)
class PeacemanRachford(AbstractSolver):
    r"""Reflects at the affine part and at the prox in turn:

        u' = 2z - u,   z' = (I + a(I - W))^(-1) (u' + a c),   u = 2z' - u',   z = prox_a(u)        [nguyen2022, 2.3.2]

    Converges for every a > 0 when I - W >= m > 0, with factor at most sqrt(1 - 4am/(1 + aL)^2).
    Costs one resolvent and, for the honest residual at z, one product a step.

    Args:
        step_size: a.
    """

    step_size: float = 1.0

    def __post_init__(self) -> None:
        check_interval(type(self).__name__, "step_size", self.step_size, low=0.0)

    def init(self, f: AbstractMap, point: Point) -> dict[str, Any]:
        _as_split(f, type(self).__name__, point.z)
        return {"u": point.z}

    def step(self, state: dict[str, Any], f: AbstractMap, point: Point) -> Step:
        split = _as_split(f, type(self).__name__, point.z)
        u, z = state["u"], point.z
        reflected = 2 * z - u
        resolved = split.resolvent(reflected, self.step_size)
        state["u"] = self._combine(u, z, reflected, resolved)
        z = split.prox(state["u"], self.step_size)
        return Step(z, f(z))

    @staticmethod
    def _combine(u: Tensor, z: Tensor, reflected: Tensor, resolved: Tensor) -> Tensor:
        return 2 * resolved - reflected


@dataclass(frozen=True)
class DouglasRachford(PeacemanRachford):
    """Peaceman-Rachford averaged with the identity: u <- u + z' - z. Slower, and converges for m = 0 as well.

    Args:
        step_size: a.
    """

    @staticmethod
    def _combine(u: Tensor, z: Tensor, reflected: Tensor, resolved: Tensor) -> Tensor:
        return u + resolved - z
