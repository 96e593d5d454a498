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
from dataclasses import dataclass

import torch
from torch import Tensor

Interval = tuple[float, float]
Bounds = tuple[Tensor, Tensor]
#: 16 units in the last place of float64.
ULPS = 2.0**-49
TINY = 2.0**-1000
_EVERYWHERE = (-math.inf, math.inf)


@dataclass(frozen=True)
class Function:
    """An elementwise function.

    Attributes:
        value: s, in float64.
        slopes: (m, r) -> (low, high): bounds of the quotients in [m - r, m + r].
        slope_range: Bounds of all quotients.
        value_range: Bounds of all values.
        increasing: Whether s does not fall, so that the values at the ends of an interval bound it.
        exact: Whether `value` is not rounded.
        remark: What a statement about all arguments leaves out.
    """

    value: Callable[[Tensor], Tensor]
    slopes: Callable[[Tensor, Tensor], Bounds]
    slope_range: Interval
    value_range: Interval = _EVERYWHERE
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


def _ends(m: Tensor, r: Tensor) -> Bounds:
    """The ends of the interval, moved outward by more than their rounding."""
    r = r * (1 + 2.0**-50) + m.abs() * 2.0**-52
    return m - r, m + r


def smooth(
    value: Callable[[Tensor], Tensor],
    derivative: Callable[[Tensor], Tensor],
    curvature: float,
    slope_range: Interval,
    value_range: Interval = _EVERYWHERE,
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
        low, high = _ends(m, r)
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
        low, high = _ends(m, r)
        a, b = derivative(low), derivative(high)
        if positive:
            a = torch.where(low > 0, a, math.nan)
        least, largest = torch.minimum(a, b), torch.maximum(a, b)
        pad = 8 * ULPS
        return least - pad * least.abs() - TINY, largest + pad * largest.abs() + TINY

    range_ = (0.0, math.inf) if rising else (-math.inf, 0.0)
    return Function(value, slopes, range_, (0.0, math.inf), rising)


def softplus(beta: float, threshold: float) -> Function:
    """log(1 + exp(b v))/b; from b v = threshold on v, as PyTorch has it, where it jumps a
    little."""
    inner = smooth(
        lambda v: torch.logaddexp(beta * v, torch.zeros_like(v)) / beta,
        lambda v: torch.sigmoid(beta * v),
        abs(beta) / 4,
        (0.0, 1.0),
        (0.0, math.inf) if beta > 0 else _EVERYWHERE,
        increasing=True,
    )
    if math.isinf(threshold):
        return inner

    def slopes(m: Tensor, r: Tensor) -> Bounds:
        a, b = inner.slopes(m, r)
        ends = torch.stack(_ends(m, r)) * beta  # a beta below 0 changes their order
        pad = 2.0**-50 * ends.abs()
        beyond, below = (ends - pad > threshold).all(0), (ends + pad <= threshold).all(0)
        a, b = torch.where(beyond, 1.0, a), torch.where(beyond, 1.0, b)
        apart = beyond | below
        return torch.where(apart, a, -math.inf), torch.where(apart, b, math.inf)

    jump = (max(-threshold, 0.0) + math.log1p(math.exp(-abs(threshold)))) / abs(beta)
    remark = (
        f"The softplus of PyTorch jumps by {jump:.0e} at its threshold, so no bound holds "
        "for all arguments. -logsigmoid(-v) is the same function without the jump."
    )
    value = lambda v: torch.where(beta * v > threshold, v, inner.value(v))  # noqa: E731
    values = (min(threshold / beta, 0.0), math.inf) if beta > 0 else _EVERYWHERE
    return Function(value, slopes, (0.0, 1.0), values, remark=remark)  # which falls at the jump


def elu(alpha: float, scale: float, input_scale: float) -> Function:
    """scale v where v > 0, scale alpha (exp(input_scale v) - 1) where not; alpha, both scales
    positive."""

    def value(v: Tensor) -> Tensor:
        return torch.where(v > 0, scale * v, scale * alpha * torch.expm1(input_scale * v.clamp(max=0)))

    steepest = scale * alpha * input_scale

    def slopes(m: Tensor, r: Tensor) -> Bounds:
        low, high = _ends(m, r)
        left = steepest * torch.exp(input_scale * low.clamp(max=0)) * (1 - 8 * ULPS)
        right = steepest * torch.exp(input_scale * high.clamp(max=0)) * (1 + 8 * ULPS)
        least = torch.where(low > 0, scale, torch.where(high < 0, left, left.clamp(max=scale)))
        largest = torch.where(low > 0, scale, torch.where(high < 0, right, right.clamp(min=scale)))
        return least, largest

    return Function(value, slopes, (0.0, max(scale, steepest)), (-scale * alpha * (1 + ULPS), math.inf), True)


def _silu_slope(v: Tensor) -> Tensor:
    p = torch.sigmoid(v)
    return p * (1 + v * torch.sigmoid(-v))


def _gelu_slope(v: Tensor) -> Tensor:
    density = torch.exp(-v * v / 2) / math.sqrt(2 * math.pi)
    return torch.special.ndtr(v) + v * density


def _gelu_tanh_slope(v: Tensor) -> Tensor:
    inner = math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)
    t = torch.tanh(inner)
    return (1 + t) / 2 + v / 2 * (1 - t * t) * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * v * v)


def _tanh_slope(v: Tensor) -> Tensor:
    decay = torch.exp(-v.abs())
    return (2 * decay / (1 + decay.square())).square()


def _erf_slope(v: Tensor) -> Tensor:
    return torch.exp(-v * v) * (2 / math.sqrt(math.pi))


def _reciprocal_slopes(m: Tensor, r: Tensor) -> Bounds:
    low, high = _ends(m, r)
    a, b = -1 / (low * low), -1 / (high * high)
    a = torch.where((low > 0) | (high < 0), a, math.nan)
    least, largest = torch.minimum(a, b), torch.maximum(a, b)
    return least * (1 + 8 * ULPS) - TINY, largest * (1 - 8 * ULPS) + TINY


#: Functions without parameters, by the name that PyTorch gives them.
PLAIN: dict[str, Function] = {
    "relu": pieces(torch.relu, (0.0,), (0.0, 1.0), exact=True),
    "abs": pieces(torch.abs, (0.0,), (-1.0, 1.0), exact=True),
    "tanh": smooth(torch.tanh, _tanh_slope, 0.77, (0.0, 1.0), (-1.0, 1.0), increasing=True),
    "sigmoid": smooth(
        torch.sigmoid, lambda v: torch.sigmoid(v) * torch.sigmoid(-v), 0.0963, (0.0, 0.25), (0.0, 1.0), increasing=True
    ),
    "silu": smooth(torch.nn.functional.silu, _silu_slope, 0.5, (-0.1, 1.1), (-0.279, math.inf)),
    "gelu": smooth(torch.nn.functional.gelu, _gelu_slope, 0.798, (-0.13, 1.13), (-0.17, math.inf)),
    "gelu_tanh": smooth(
        lambda v: torch.nn.functional.gelu(v, approximate="tanh"), _gelu_tanh_slope, 0.81, (-0.13, 1.13), (-0.171, math.inf)
    ),
    "sin": smooth(torch.sin, torch.cos, 1.0, (-1.0, 1.0), (-1.0, 1.0)),
    "cos": smooth(torch.cos, lambda v: -torch.sin(v), 1.0, (-1.0, 1.0), (-1.0, 1.0)),
    "atan": smooth(torch.atan, lambda v: 1 / (1 + v * v), 0.65, (0.0, 1.0), (-1.5708, 1.5708), increasing=True),
    "erf": smooth(torch.erf, _erf_slope, 0.97, (0.0, 1.1284), (-1.0, 1.0), increasing=True),
    "exp": between_ends(torch.exp, torch.exp, positive=False, rising=True),
    "sqrt": between_ends(torch.sqrt, lambda v: 0.5 / v.sqrt(), positive=True, rising=True),
    "rsqrt": between_ends(torch.rsqrt, lambda v: -0.5 / (v * v.sqrt()), positive=True, rising=False),
    "reciprocal": Function(torch.reciprocal, _reciprocal_slopes, (-math.inf, 0.0)),
    "hardsigmoid": pieces(torch.nn.functional.hardsigmoid, (-3.0, 3.0), (0.0, 1 / 6, 0.0), exact=False),
}


def leaky_relu(negative_slope: float) -> Function:
    """v where v > 0, b v where not."""
    return pieces(
        lambda v: torch.where(v > 0, v, negative_slope * v), (0.0,), (negative_slope, 1.0), exact=negative_slope in (0.0, 1.0)
    )


def clamp(low: float | None, high: float | None) -> Function:
    """v between two numbers, either of which may be absent."""
    kinks = tuple(float(end) for end in (low, high) if end is not None)
    slopes = ((0.0,) if low is not None else ()) + (1.0,) + ((0.0,) if high is not None else ())
    return pieces(lambda v: v.clamp(low, high), kinks, slopes, exact=True)


def softshrink(threshold: float) -> Function:
    """sgn(v) max(|v| - t, 0)."""
    return pieces(lambda v: torch.nn.functional.softshrink(v, threshold), (-threshold, threshold), (1.0, 0.0, 1.0), exact=False)
