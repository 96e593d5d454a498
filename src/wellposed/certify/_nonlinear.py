"""Activations, normalisations and softmax as steps of a tape; importing this registers them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from wellposed.certify import _activations
from wellposed.certify._activations import PLAIN
from wellposed.certify._steps import depends, function, linear, lowers, plus, scaled, times
from wellposed.certify._tape import Node


@lowers(
    "relu", "abs", "tanh", "sigmoid", "silu", "sin", "cos", "atan", "erf", "exp", "sqrt", "rsqrt", "reciprocal", "hardsigmoid"
)
def _plain(tape: Any, func: Any, out: Tensor, a: Node) -> Node:
    name = func._schema.name.removeprefix("aten::")
    return function(tape, a, PLAIN[name], name)


@lowers("gelu")
def _gelu(tape: Any, func: Any, out: Tensor, a: Node, *, approximate: str = "none") -> Node:
    return function(tape, a, PLAIN["gelu" if approximate == "none" else "gelu_tanh"], "gelu")


@lowers("leaky_relu")
def _leaky_relu(tape: Any, func: Any, out: Tensor, a: Node, negative_slope: float = 0.01) -> Node:
    return function(tape, a, _activations.leaky_relu(float(negative_slope)), "leaky_relu")


@lowers("_prelu_kernel")
def _prelu(tape: Any, func: Any, out: Tensor, a: Node, weight: Node) -> Node:
    # w v + (1 - w) relu(v)
    positive = function(tape, a, PLAIN["relu"], "relu")
    return plus(tape, times(tape, a, weight), times(tape, positive, plus(tape, 1.0, weight, -1.0)))


@lowers("elu")
def _elu(tape: Any, func: Any, out: Tensor, a: Node, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Node | None:
    if min(alpha, scale, input_scale) <= 0:
        return None
    return function(tape, a, _activations.elu(float(alpha), float(scale), float(input_scale)), "elu")


@lowers("celu")
def _celu(tape: Any, func: Any, out: Tensor, a: Node, alpha: float = 1) -> Node | None:
    return function(tape, a, _activations.celu(float(alpha)), "elu") if alpha > 0 else None


@lowers("softplus", infinite=True)
def _softplus(tape: Any, func: Any, out: Tensor, a: Node, beta: float = 1, threshold: float = 20) -> Node | None:
    if beta == 0 or math.isinf(beta):
        return None
    return function(tape, a, _activations.softplus(float(beta), float(threshold)), "softplus")


@lowers("log_sigmoid_forward")
def _log_sigmoid(tape: Any, func: Any, out: Any, a: Node) -> list[Node | str]:
    inner = function(tape, scaled(tape, a, -1.0), _activations.softplus(1.0, math.inf), "softplus")
    return [scaled(tape, inner, -1.0), "It uses a part of log_sigmoid that is not known to this proof."]


@lowers("logaddexp")
def _logaddexp(tape: Any, func: Any, out: Tensor, a: Node, b: Node) -> Node:
    # log(e^a + e^b) = b + softplus(a - b)
    return plus(tape, function(tape, plus(tape, a, b, -1.0), _activations.softplus(1.0, math.inf), "softplus"), b)


@lowers("softshrink")
def _softshrink(tape: Any, func: Any, out: Tensor, a: Node, threshold: float = 0.5) -> Node:
    return function(tape, a, _activations.softshrink(float(threshold)), "softshrink")


@lowers("hardtanh", infinite=True)
def _hardtanh(tape: Any, func: Any, out: Tensor, a: Node, low: float = -1, high: float = 1) -> Node | None:
    return _clamp(tape, func, out, a, float(low), float(high))


@lowers("clamp", "clamp_min", infinite=True)
def _clamp(tape: Any, func: Any, out: Tensor, a: Node, min: Any = None, max: Any = None) -> Node | None:  # noqa: A002
    min, max = (None if end == free else end for end, free in ((min, -math.inf), (max, math.inf)))  # noqa: A001
    if isinstance(min, Node) or isinstance(max, Node) or (min is not None and max is not None and min > max):
        return None
    if math.inf in (min, max) or -math.inf in (min, max):
        return None
    return function(tape, a, _activations.clamp(min, max), "clamp") if (min, max) != (None, None) else a


@lowers("clamp_max", infinite=True)
def _clamp_max(tape: Any, func: Any, out: Tensor, a: Node, max: Any) -> Node | None:  # noqa: A002
    return _clamp(tape, func, out, a, None, max)


@lowers("maximum", "minimum")
def _maximum(tape: Any, func: Any, out: Tensor, a: Node, b: Node) -> Node:
    # max(a, b) = b + relu(a - b), min(a, b) = b - relu(b - a)
    if "maximum" in str(func):
        return plus(tape, b, function(tape, plus(tape, a, b, -1.0), PLAIN["relu"], "relu"))
    return plus(tape, b, function(tape, plus(tape, b, a, -1.0), PLAIN["relu"], "relu"), -1.0)


@lowers("_softmax")
def _softmax(tape: Any, func: Any, out: Tensor, a: Node, dim: int, half: bool) -> Node | None:
    if not a.shape:
        return None
    # the same for a shift that is constant; near the largest entry nothing overflows
    powers = function(tape, a, PLAIN["exp"], "exp")
    shape = torch.Size(1 if i == dim % len(a.shape) else size for i, size in enumerate(a.shape))
    total = linear(tape, (powers,), lambda t: t.sum(dim, keepdim=True), shape, terms=a.shape[dim] + 16, name="sum")
    return times(tape, powers, function(tape, total, PLAIN["reciprocal"], "reciprocal"))


def _normalised(tape: Any, a: Node, rows: int, epsilon: float) -> Node:
    """a with its entries, as `rows` rows, normalised row by row."""
    shape = torch.Size((rows, a.shape.numel() // rows))
    flat = linear(tape, (a,), lambda t: t.reshape(shape), shape, name="move")
    step: Node = tape.add(Node("normalise", shape, epsilon=float(epsilon), name="normalise", **depends((flat,))))
    return linear(tape, (step,), lambda t: t.reshape(a.shape), a.shape, name="move")


def _affine(tape: Any, a: Node, weight: Node | None, bias: Node | None, shape: Sequence[int]) -> Node:
    for parameter, join in ((weight, times), (bias, plus)):
        if parameter is not None:
            shaped = linear(tape, (parameter,), lambda t: t.reshape(shape), torch.Size(shape), name="move")
            a = join(tape, a, shaped)
    return a


_OTHERS = "It uses the mean or the variance of a normalisation, which is not known to this proof."


@lowers("native_layer_norm")
def _layer_norm(
    tape: Any,
    func: Any,
    out: Any,
    a: Node,
    shape: Sequence[int],
    weight: Node | None,
    bias: Node | None,
    epsilon: float,
) -> list[Node | str]:
    rows = a.shape.numel() // math.prod(shape)
    return [_affine(tape, _normalised(tape, a, rows, epsilon), weight, bias, list(shape)), _OTHERS, _OTHERS]


@lowers("native_group_norm")
def _group_norm(
    tape: Any, func: Any, out: Any, a: Node, weight: Node | None, bias: Node | None, *options: Any
) -> list[Node | str]:
    n, c, _, groups, epsilon = options
    shape = [1, c, *(1,) * (len(a.shape) - 2)]
    return [_affine(tape, _normalised(tape, a, n * groups, epsilon), weight, bias, shape), _OTHERS, _OTHERS]


@lowers("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training")
def _batch_norm(
    tape: Any,
    func: Any,
    out: Any,
    a: Node,
    weight: Node | None,
    bias: Node | None,
    mean: Any,
    variance: Any,
    *rest: Any,
) -> list[Node | str] | None:
    training = not str(func).endswith("no_training.default") and rest[0]
    if training or not isinstance(mean, Node) or not isinstance(variance, Node):
        return None
    shape = [1, a.shape[1], *(1,) * (len(a.shape) - 2)]
    factor = function(tape, plus(tape, variance, float(rest[-1])), PLAIN["rsqrt"], "rsqrt")
    centred = _affine(tape, a, None, scaled(tape, mean, -1.0), shape)
    return [_affine(tape, _affine(tape, centred, factor, None, shape), weight, bias, shape), _OTHERS, _OTHERS]
