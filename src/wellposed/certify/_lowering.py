"""Linear operations of torch, and products, as steps of a tape; importing this registers them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from wellposed.certify._activations import PLAIN
from wellposed.certify._operations import MOVES, SPLITS, SUMS
from wellposed.certify._steps import bilinear, function, linear, lowers, operand, plus, scaled, times
from wellposed.certify._tape import Node


@lowers(*MOVES)
def _move(tape: Any, func: Any, out: Tensor, a: Node, *rest: Any, **named: Any) -> Node | None:
    if any(isinstance(item, Node) for item in rest):
        return None
    if "view" in str(func) or "_reshape_alias" in str(func):  # under vmap the memory may lie otherwise than when recorded
        return linear(tape, (a,), lambda t: t.reshape(out.shape), out.shape, name="move")
    return linear(tape, (a,), lambda t: func(t, *rest, **named), out.shape, name="move")


@lowers("detach")
def _detach(tape: Any, func: Any, out: Tensor, a: Node) -> Node:
    tape.hides = tape.hides or a.of_z
    return linear(tape, (a,), lambda t: t, out.shape, name="detach")


@lowers(*SUMS)
def _sum(tape: Any, func: Any, out: Tensor, a: Node, *rest: Any, **named: Any) -> Node | None:
    if named.get("dtype") is not None or any(isinstance(item, int) and item < 0 for item in rest[5:]):
        return None  # the latter: a divisor that turns signs
    if not a.shape.numel():  # a mean of nothing is NaN
        return None
    terms = a.shape.numel() + 16  # windows may overlap
    if str(func).startswith(("aten.sum", "aten.mean")):
        terms = a.shape.numel() // max(1, out.numel()) + 16
    return linear(tape, (a,), lambda t: func(t, *rest, **named), out.shape, terms=terms, name="sum")


@lowers(*SPLITS)
def _split(tape: Any, func: Any, out: Any, a: Node, *rest: Any, **named: Any) -> list[Node]:
    return [
        linear(tape, (a,), lambda t, i=i: func(t, *rest, **named)[i], part.shape, name="move") for i, part in enumerate(out)
    ]


@lowers("cat", "stack")
def _cat(tape: Any, func: Any, out: Tensor, parts: Sequence[Node], dim: int = 0) -> Node:
    return linear(tape, parts, lambda *tensors: func(list(tensors), dim), out.shape, name="cat")


@lowers("constant_pad_nd")
def _pad(tape: Any, func: Any, out: Tensor, a: Node, pad: Any, value: float = 0) -> Node | None:
    return None if value else linear(tape, (a,), lambda t: func(t, pad, 0), out.shape, name="move")


@lowers("_to_copy")
def _cast(tape: Any, func: Any, out: Tensor, a: Node, *, dtype: Any = None, **named: Any) -> Node | None:
    lost = dtype is not None and dtype not in (torch.float32, torch.float64)
    return None if lost else linear(tape, (a,), lambda t: t.clone(), out.shape, name="move")


@lowers("slice_scatter", "select_scatter")
def _scatter(tape: Any, func: Any, out: Tensor, a: Node, b: Node, *rest: Any, **named: Any) -> Node:
    # which entries are written: under vmap PyTorch fails for the number that stands for an open end of a slice
    place = func(torch.full(a.shape, -1), torch.arange(b.shape.numel()).reshape(b.shape), *rest, **named)
    written, entry = place >= 0, place.clamp(min=0)
    if not b.shape.numel():
        return linear(tape, (a,), lambda s: s.clone(), out.shape, name="move")
    return linear(tape, (a, b), lambda s, t: torch.where(written, t.reshape(-1)[entry], s), out.shape, name="cat")


@lowers("copy")
def _copy(tape: Any, func: Any, out: Tensor, a: Node, b: Node, *rest: Any) -> Node:
    return linear(tape, (b,), lambda t: t.expand(out.shape).clone(), out.shape, name="move")


@lowers("index_select", "index")
def _index(tape: Any, func: Any, out: Tensor, a: Node, *rest: Any) -> Node | None:
    flat = [item for part in rest for item in (part if isinstance(part, (list, tuple)) else [part])]
    if any(isinstance(item, Node) and (item.kind != "constant" or item.value is None) for item in flat):
        return None
    given = [
        [item.value if isinstance(item, Node) else item for item in part]
        if isinstance(part, (list, tuple))
        else part.value
        if isinstance(part, Node)
        else part
        for part in rest
    ]
    return linear(tape, (a,), lambda t: func(t, *given), out.shape, name="move")


@lowers("where")
def _where(tape: Any, func: Any, out: Tensor, condition: Node, a: Any, b: Any) -> Node | None:
    if condition.kind != "constant" or condition.value is None:
        return None
    mask = condition.value
    parents = (operand(tape, a), operand(tape, b))
    return linear(tape, parents, lambda s, t: torch.where(mask, s, t), out.shape, name="cat")


@lowers("masked_fill")
def _masked_fill(tape: Any, func: Any, out: Tensor, a: Node, mask: Node, value: Any) -> Node | None:
    if mask.kind != "constant" or isinstance(value, Node) or not math.isfinite(value):
        return None
    return _where(tape, func, out, mask, value, a)


@lowers("add")
def _add(tape: Any, func: Any, out: Tensor, a: Any, b: Any, *, alpha: float = 1) -> Node:
    return plus(tape, a, b, alpha)


@lowers("sub", "subtract")
def _sub(tape: Any, func: Any, out: Tensor, a: Any, b: Any, *, alpha: float = 1) -> Node:
    return plus(tape, a, b, -alpha)


@lowers("rsub")
def _rsub(tape: Any, func: Any, out: Tensor, a: Any, b: Any, alpha: float = 1) -> Node:
    return plus(tape, b, a, -alpha)


@lowers("neg")
def _neg(tape: Any, func: Any, out: Tensor, a: Node) -> Node:
    return scaled(tape, a, -1.0)


@lowers("mul")
def _mul(tape: Any, func: Any, out: Tensor, a: Any, b: Any) -> Node:
    return times(tape, a, b)


@lowers("div")
def _div(tape: Any, func: Any, out: Tensor, a: Any, b: Any) -> Node | None:
    if isinstance(b, Node):
        return times(tape, a, function(tape, b, PLAIN["reciprocal"], "reciprocal"))
    if b == 0:
        return None
    return linear(tape, (a,), lambda t: t / b, a.shape, terms=1, absolute=lambda t: t / abs(b), name=f"scale {1 / b!r}")


@lowers("square")
def _square(tape: Any, func: Any, out: Tensor, a: Node) -> Node:
    return times(tape, a, a)


@lowers("pow")
def _pow(tape: Any, func: Any, out: Tensor, a: Any, exponent: Any) -> Node | None:
    if not isinstance(a, Node) or exponent not in (2, 3, 0.5, -0.5, -1, 1):
        return None
    if name := {0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}.get(exponent):
        return function(tape, a, PLAIN[name], name)
    result = a
    for _ in range(int(exponent) - 1):
        result = times(tape, result, a)
    return result


@lowers("lerp")
def _lerp(tape: Any, func: Any, out: Tensor, a: Node, b: Node, weight: Any) -> Node:
    return plus(tape, a, times(tape, plus(tape, b, a, -1.0), weight))


@lowers("addcmul")
def _addcmul(tape: Any, func: Any, out: Tensor, a: Node, b: Node, c: Node, *, value: float = 1) -> Node:
    return plus(tape, a, times(tape, b, c), value)


@lowers("mm", "bmm", "mv", "dot")
def _mm(tape: Any, func: Any, out: Tensor, a: Node, b: Node) -> Node:
    return bilinear(tape, a, b, torch.matmul, out.shape, a.shape[-1], "mm")


@lowers("addmm", "baddbmm", "addmv")
def _addmm(tape: Any, func: Any, out: Tensor, c: Node, a: Node, b: Node, *, beta: float = 1, alpha: float = 1) -> Node:
    product = scaled(tape, _mm(tape, func, out, a, b), float(alpha))
    return product if beta == 0 else plus(tape, product, scaled(tape, c, float(beta)))


@lowers("convolution")
def _convolution(tape: Any, func: Any, out: Tensor, a: Node, weight: Node, bias: Node | None, *options: Any) -> Node:
    transposed, groups = options[3], options[5]
    each = weight.shape[0] // groups if transposed else weight.shape[1]
    terms = each * weight.shape[2:].numel()

    def apply(t: Tensor, w: Tensor) -> Tensor:
        result: Tensor = torch.ops.aten.convolution(t, w, None, *options)
        return result

    name = f"convolution transposed {groups}" if transposed else f"convolution {groups}"
    product = bilinear(tape, a, weight, apply, out.shape, terms, name)
    if bias is None:
        return product
    dims = (1, -1, *(1,) * (len(out.shape) - 2))
    shaped = linear(tape, (bias,), lambda t: t.reshape(dims), torch.Size((1, bias.shape[0], *dims[2:])), name="move")
    return plus(tape, product, shaped)
