r"""Elementwise functions: values and difference quotients, bounded from both sides.

For t1, t2 in an interval the quotient (s(t1) - s(t2))/(t1 - t2) lies between the least and the
largest derivative there. A smooth s with |s''| <= c has, in an interval of middle m and radius r,

    s'(m) - c r <= s' <= s'(m) + c r;                                                            (1)

functions that are monotone with a monotone derivative take the derivatives at the ends, and
functions of straight pieces the slopes of the pieces that the interval meets. What is assumed of
the library of elementary functions: an error of at most 16 units in the last place of the result or
of the argument, whichever is larger.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

Interval = tuple[float, float]
Bounds = tuple[Tensor, Tensor]
#: 16 units in the last place of float64.
ULPS = 2.0**-49
TINY = 2.0**-1000
EVERYWHERE = (-math.inf, math.inf)


@dataclass(frozen=True)
class Function:
    """An elementwise function.

    Attributes:
        value: s, in float64.
        slopes: (m, r) -> (low, high): bounds of the quotients in [m - r, m + r], and of what
            PyTorch takes for the derivative there.
        slope_range: Bounds of all quotients.
        value_range: Bounds of all values.
        increasing: Whether s does not fall, so that the values at the ends of an interval bound it.
        exact: Whether `value` is not rounded.
        remark: What a statement about all arguments leaves out.
    """

    value: Callable[[Tensor], Tensor]
    slopes: Callable[[Tensor, Tensor], Bounds]
    slope_range: Interval
    value_range: Interval = EVERYWHERE
    increasing: bool = False
    exact: bool = False
    remark: str = ""

    def slopes_on(self, low: float, high: float) -> Interval:
        """Bounds of the quotients for arguments in [low, high], which may be all numbers."""
        least, largest = self.slope_range
        if math.isfinite(low) and math.isfinite(high):
            middle, radius = _middle(low, high)
            a, b = self.slopes(middle, radius)
            least, largest = _tighter(least, float(a), max), _tighter(largest, float(b), min)
        return least, largest

    def values_on(self, low: float, high: float) -> Interval:
        """Bounds of the values for arguments in [low, high]."""
        least, largest = self.value_range
        if not self.increasing:
            return least, largest
        at = [float(self.value(torch.tensor(end, dtype=torch.float64))) for end in (low, high)]
        slack = [0.0 if self.exact else ULPS * (abs(v) + abs(end)) for v, end in zip(at, (low, high), strict=True)]
        below, above = at[0] - slack[0], at[1] + slack[1]
        return (
            least if not math.isfinite(low) else _tighter(least, below, max),
            largest if not math.isfinite(high) else _tighter(largest, above, min),
        )


def _tighter(known: float, found: float, choose: Callable[[float, float], float]) -> float:
    return known if math.isnan(found) else choose(known, found)


def _middle(low: float, high: float) -> Bounds:
    middle = torch.tensor((low + high) / 2, dtype=torch.float64)
    radius = torch.tensor(max(high - float(middle), float(middle) - low), dtype=torch.float64)
    return middle, radius * (1 + 2.0**-50) + TINY


def ends(m: Tensor, r: Tensor) -> Bounds:
    """The ends of the interval, moved outward by more than their rounding."""
    r = r * (1 + 2.0**-50) + m.abs() * 2.0**-52
    return m - r, m + r


def differentiated_as(function: Function, other: Function) -> Function:
    """The same function, where PyTorch's derivative is that of another one."""

    def slopes(m: Tensor, r: Tensor) -> Bounds:
        (a, b), (c, d) = function.slopes(m, r), other.slopes(m, r)
        return torch.minimum(a, c), torch.maximum(b, d)

    return replace(function, slopes=slopes)


def in_float32(number: float) -> float:
    """As some derivatives of PyTorch have a number, whatever their dtype."""
    return torch.tensor(number, dtype=torch.float32).item()


def smooth(
    value: Callable[[Tensor], Tensor],
    derivative: Callable[[Tensor], Tensor],
    curvature: float,
    slope_range: Interval,
    value_range: Interval = EVERYWHERE,
    *,
    increasing: bool = False,
) -> Function:
    """By (1).

    Args:
        value, derivative: s and s'.
        curvature: c.
        slope_range, value_range, increasing: As in `Function`.
    """

    def slopes(m: Tensor, r: Tensor) -> Bounds:
        d = derivative(m)
        pad = curvature * r * (1 + 2.0**-50) + 8 * ULPS * (1 + d.abs())
        return (d - pad).clamp(min=slope_range[0]), (d + pad).clamp(max=slope_range[1])

    return Function(value, slopes, slope_range, value_range, increasing)


def pieces(value: Callable[[Tensor], Tensor], kinks: tuple[float, ...], slopes: tuple[float, ...], *, exact: bool) -> Function:
    """A continuous function of straight pieces.

    Args:
        value: s.
        kinks: Where two pieces meet, ascending. slopes: Of the pieces, one more.
        exact: As in `Function`.
    """
    starts, stops = (-math.inf, *kinks), (*kinks, math.inf)

    def met(m: Tensor, r: Tensor) -> Bounds:
        low, high = ends(m, r)
        least, largest = torch.full_like(m, math.inf), torch.full_like(m, -math.inf)
        for start, stop, slope in zip(starts, stops, slopes, strict=True):
            meets = (low <= stop) & (high >= start)
            least = torch.where(meets, least.clamp(max=slope), least)
            largest = torch.where(meets, largest.clamp(min=slope), largest)
        return least, largest

    bounds = (min(slopes), max(slopes))
    values = [float(value(torch.tensor(kink, dtype=torch.float64))) for kink in kinks]
    rising = min(slopes) >= 0
    low = min(values) if (rising and slopes[0] == 0) or slopes[0] < 0 < slopes[-1] else -math.inf
    high = max(values) if rising and slopes[-1] == 0 else math.inf
    return Function(value, met, bounds, (low, high), rising, exact)


def between_ends(
    value: Callable[[Tensor], Tensor], derivative: Callable[[Tensor], Tensor], *, positive: bool, rising: bool
) -> Function:
    """A monotone function with positive values and a monotone derivative, and relative rounding
    errors.

    Args:
        value, derivative: s and s'.
        positive: Whether it is defined for positive arguments alone.
        rising: Whether s rises.
    """

    def slopes(m: Tensor, r: Tensor) -> Bounds:
        low, high = ends(m, r)
        a, b = derivative(low), derivative(high)
        if positive:
            a = torch.where(low > 0, a, math.nan)
        least, largest = torch.minimum(a, b), torch.maximum(a, b)
        pad = 8 * ULPS
        return least - pad * least.abs() - TINY, largest + pad * largest.abs() + TINY

    range_ = (0.0, math.inf) if rising else (-math.inf, 0.0)
    return Function(value, slopes, range_, (0.0, math.inf), rising)
