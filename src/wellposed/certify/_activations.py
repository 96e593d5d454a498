"""The elementwise functions that certificates know."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wellposed.certify._functions import (
    EVERYWHERE,
    TINY,
    ULPS,
    Bounds,
    Function,
    between_ends,
    differentiated_as,
    ends,
    in_float32,
    pieces,
    smooth,
)


def softplus(beta: float, threshold: float) -> Function:
    """log(1 + exp(b v))/b; from b v = threshold on v, as PyTorch has it, where it jumps a
    little."""
    inner = smooth(
        lambda v: torch.logaddexp(beta * v, torch.zeros_like(v)) / beta,
        lambda v: torch.sigmoid(beta * v),
        abs(beta) / 4,
        (0.0, 1.0),
        (0.0, math.inf) if beta > 0 else EVERYWHERE,
        increasing=True,
    )
    if math.isinf(threshold):
        return inner

    def slopes(m: Tensor, r: Tensor) -> Bounds:
        a, b = inner.slopes(m, r)
        scaled = torch.stack(ends(m, r)) * beta  # a beta below 0 changes their order
        pad = 2.0**-50 * scaled.abs()
        beyond, below = (scaled - pad > threshold).all(0), (scaled + pad <= threshold).all(0)
        a, b = torch.where(beyond, 1.0, a), torch.where(beyond, 1.0, b)
        apart = beyond | below
        return torch.where(apart, a, -math.inf), torch.where(apart, b, math.inf)

    jump = (max(-threshold, 0.0) + math.log1p(math.exp(-abs(threshold)))) / abs(beta)
    remark = (
        f"The softplus of PyTorch jumps by {jump:.0e} at its threshold, so no bound holds "
        "for all arguments. -logsigmoid(-v) is the same function without the jump."
    )
    value = lambda v: torch.where(beta * v > threshold, v, inner.value(v))  # noqa: E731
    values = (min(threshold / beta, 0.0), math.inf) if beta > 0 else EVERYWHERE
    return Function(value, slopes, (0.0, 1.0), values, remark=remark)  # which falls at the jump


def elu(alpha: float, scale: float, input_scale: float) -> Function:
    """scale v where v > 0, scale alpha (exp(input_scale v) - 1) where not; alpha, both scales
    positive."""

    def value(v: Tensor) -> Tensor:
        return torch.where(v > 0, scale * v, scale * alpha * torch.expm1(input_scale * v.clamp(max=0)))

    steepest = scale * alpha * input_scale

    def slopes(m: Tensor, r: Tensor) -> Bounds:
        low, high = ends(m, r)
        left = steepest * torch.exp(input_scale * low.clamp(max=0)) * (1 - 8 * ULPS)
        right = steepest * torch.exp(input_scale * high.clamp(max=0)) * (1 + 8 * ULPS)
        least = torch.where(low > 0, scale, torch.where(high < 0, left, left.clamp(max=scale)))
        largest = torch.where(low > 0, scale, torch.where(high < 0, right, right.clamp(min=scale)))
        return least, largest

    return Function(value, slopes, (0.0, max(scale, steepest)), (-scale * alpha * (1 + ULPS), math.inf), True)


def celu(alpha: float) -> Function:
    """v where v > 0, alpha (exp(v/alpha) - 1) where not; alpha positive."""
    return differentiated_as(elu(alpha, 1.0, 1 / alpha), elu(alpha, 1.0, 1 / in_float32(alpha)))


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
    low, high = ends(m, r)
    a, b = -1 / (low * low), -1 / (high * high)
    a = torch.where((low > 0) | (high < 0), a, math.nan)
    least, largest = torch.minimum(a, b), torch.maximum(a, b)
    return least * (1 + 8 * ULPS) - TINY, largest * (1 - 8 * ULPS) + TINY


def _hardsigmoid(slope: float) -> Function:
    return pieces(torch.nn.functional.hardsigmoid, (-3.0, 3.0), (0.0, slope, 0.0), exact=False)


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
    "hardsigmoid": differentiated_as(_hardsigmoid(1 / 6), _hardsigmoid(in_float32(1 / 6))),
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
