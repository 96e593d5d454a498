r"""The unit in which data are measured: a power of two, so that no square of a feature leaves the range of float64.

A network without biases is positively homogeneous: with inputs and labels c X and c y its injections, equilibria and residual
are c C, c Z and c r, its tangent kernel is c^2 K, and the parameters, their radii and what contracts are the same. So a
certificate for (c X, c y) is the one for (X, y) with steps divided by c^2 and rates of the flow multiplied by c^2. For
c = 2^k all of it is exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from wellposed.certify._directed import down, up
from wellposed.certify._range import OUT_OF_RANGE
from wellposed.linalg.scaling import exponent_of, ldexp, ldexp_down, ldexp_up
from wellposed.nn import AbstractNetwork, GaussianDEQ, ImplicitOnlyDEQ, MonotoneDEQ, SkipDEQ

__all__ = ["HOMOGENEOUS", "LIMIT", "UNDERFLOW", "Unit", "no_room", "out_of_range", "row_norms_upper", "unit_of"]

#: Without biases: injections, equilibria and predictions are positively homogeneous in the inputs.
HOMOGENEOUS = (GaussianDEQ, SkipDEQ, ImplicitOnlyDEQ, MonotoneDEQ)
#: Data and parameters up to 2^LIMIT, and features down to 2^-LIMIT, are measured as they are: the theorems multiply a few of
#: them, and the products of four have room to spare.
LIMIT = 200
_SQUARED = 480
#: What underflow takes away, at most, from the norm of a vector of up to 2^60 entries: each square loses at most 2^-1075.
UNDERFLOW = 2.0**-500


@dataclass(frozen=True)
class Unit:
    """Data are in units of 2^exponent: a number that grows like the p-th power of the inputs has 2^(p exponent) as its unit."""

    exponent: int = 0

    def upper(self, value: float, power: int = 1) -> float:
        """`value` of the data as they were given, from above."""
        return ldexp_up(up(value), power * self.exponent) if self.exponent else value

    def lower(self, value: float, power: int = 1) -> float:
        """`value` of the data as they were given, from below."""
        return max(0.0, ldexp_down(down(value), power * self.exponent)) if self.exponent and value >= 0 else value

    def around(self, bounds: tuple[float, float], power: int) -> tuple[float, float]:
        """A lower and an upper bound of the data as they were given; the lower one may be negative."""
        lower, upper = bounds
        if not self.exponent:
            return bounds
        return ldexp_down(down(lower), power * self.exponent), ldexp_up(up(upper), power * self.exponent)

    def exact(self, value: float, power: int) -> float:
        """`value` of the data as they were given, exactly; 0 or infinity where a normal float64 does not hold it."""
        if not self.exponent:
            return value
        try:
            number = math.ldexp(value, power * self.exponent)
        except OverflowError:
            return math.inf
        return number if abs(number) >= 2.0**-1022 else 0.0

    def sides(self, value: float, bound: float, power: int) -> tuple[float, float, str]:
        """Both sides of a comparison of the data as they were given, so that it reads as it was made; and a note.

        Where float64 does not hold one of them exactly, both stay in the unit, and the note says so.
        """
        given = self.exact(value, power), self.exact(bound, power)
        if all((a == 0) == (b == 0) and math.isinf(a) == math.isinf(b) for a, b in zip((value, bound), given, strict=True)):
            return *given, ""
        return value, bound, f"both sides in units of 2^{power * self.exponent}"


def unit_of(model: AbstractNetwork, X: Tensor, y: Tensor) -> tuple[Unit, Tensor, Tensor] | str:
    """A unit in which the data have room, with X and y in it; or why there is none.

    It is 1 where the data have room as they are. Entries that vanish in the unit lose at most 2^-1074.

    Args:
        model: A float64 network with finite parameters.
        X: (n, d). y: (n,).
    """
    large = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if exponent_of(tensor) > LIMIT]
    if large:
        return out_of_range(f"parameter {large[0]} has entries above 2^{LIMIT}")
    first = exponent_of(X)
    exponent = first + exponent_of(model.injection(ldexp(X, -first))) if type(model) in HOMOGENEOUS else 0
    if abs(exponent) <= LIMIT and abs(first) <= LIMIT:
        exponent = 0
    X, y = ldexp(X, -exponent), ldexp(y, -exponent)
    for name, tensor in (("inputs", X), ("labels", y)):
        if not bool(torch.isfinite(tensor).all()) or exponent_of(tensor) > LIMIT:
            relative = f", beside features of size 2^{exponent}" if exponent else ""
            return out_of_range(f"the {name} are larger than 2^{LIMIT + exponent}{relative}")
    return Unit(exponent), X, y


def no_room(model: nn.Module, X: Tensor, y: Tensor) -> str:
    """Why a network with biases, whose only unit is 1, cannot be measured; empty if it can."""
    for name, tensor in (("inputs", X), ("labels", y)):
        if exponent_of(tensor) > _SQUARED:  # only squares of data occur, not fourth powers
            return out_of_range(f"the {name} are larger than 2^{_SQUARED}")
    if bool(X.any()) and exponent_of(X) < -_SQUARED:
        return out_of_range(f"the inputs are smaller than 2^-{_SQUARED}")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if exponent_of(tensor) > LIMIT:
            return out_of_range(f"parameter {name} has entries above 2^{LIMIT}")
    return ""


def row_norms_upper(A: Tensor) -> Tensor:
    """(n,) upper bounds of the norms of the rows, up to their relative rounding."""
    return torch.linalg.vector_norm(A, dim=1) + UNDERFLOW


def out_of_range(which: str) -> str:
    """The note of an undecided certificate."""
    return f"{OUT_OF_RANGE} in the conditions of the theorems: {which}. Rescale the inputs, the labels or the parameters."
