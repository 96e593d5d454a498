"""The table of operations that a tape knows, and the steps of which they are made."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from wellposed.certify._functions import Function
from wellposed.certify._tape import Node

LOWER: dict[str, Callable[..., Any]] = {}


def lowers(*names: str, infinite: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers how operations become steps; None as a result says that it is not known how.

    Args:
        names: Of the operations.
        infinite: Whether numbers among their arguments may be infinite. If not, nothing is known of
            an operation with such a number, or with NaN: 0 times infinity is not 0.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def lower(tape: Any, func: Any, out: Any, *args: Any, **named: Any) -> Any:
            numbers = [number for number in (*args, *named.values()) if isinstance(number, float)]
            if any(math.isnan(number) or (math.isinf(number) and not infinite) for number in numbers):
                if any(isinstance(step, Node) and step.of_z for step in args):
                    raise tape.refuse(f"It computes with a number that is NaN or infinite ({names[0]}).")
                return None
            return function(tape, func, out, *args, **named)

        LOWER.update(dict.fromkeys(names, lower))
        return lower

    return register


def depends(parents: Sequence[Node]) -> dict[str, Any]:
    return {
        "parents": tuple(parents),
        "of_z": any(parent.of_z for parent in parents),
        "of_x": any(parent.of_x for parent in parents),
    }


def linear(
    tape: Any,
    parents: Sequence[Node],
    apply: Callable[..., Tensor],
    shape: torch.Size,
    *,
    terms: int = 0,
    absolute: Callable[..., Tensor] | None = None,
    name: str = "",
) -> Node:
    """A linear step of all parents together."""
    step = Node("linear", shape, apply=apply, absolute=absolute or apply, terms=terms, name=name, **depends(parents))
    result: Node = tape.add(step)
    return result


def bilinear(
    tape: Any, a: Node, b: Node, apply: Callable[[Tensor, Tensor], Tensor], shape: torch.Size, terms: int, name: str
) -> Node:
    """A step that is linear in each of two parents, with coefficients 0 and 1."""
    result: Node = tape.add(Node("bilinear", shape, apply=apply, terms=terms, name=name, **depends((a, b))))
    return result


def function(tape: Any, a: Node, function: Function, name: str) -> Node:
    result: Node = tape.add(Node("function", a.shape, function=function, name=name, **depends((a,))))
    return result


def scaled(tape: Any, a: Node, factor: float) -> Node:
    if factor == 1:
        return a
    exact = math.frexp(abs(factor))[0] == 0.5
    return linear(
        tape,
        (a,),
        lambda t: t * factor,
        a.shape,
        terms=0 if exact else 1,
        absolute=lambda t: t * abs(factor),
        name=f"scale {factor!r}",
    )


def operand(tape: Any, a: Any) -> Node:
    """A number as a constant."""
    if isinstance(a, Node):
        return a
    step: Node = tape.add(Node("constant", torch.Size(), value=torch.tensor(float(a), dtype=torch.float64)))
    return step


def plus(tape: Any, a: Any, b: Any, alpha: float = 1.0) -> Node:
    """a + alpha b."""
    a, b = operand(tape, a), operand(tape, b)
    if alpha not in (1, -1):
        b, alpha = scaled(tape, b, alpha), 1
    shape = torch.broadcast_shapes(a.shape, b.shape)
    return linear(
        tape, (a, b), lambda s, t: s + t if alpha == 1 else s - t, shape, terms=1, absolute=lambda s, t: s + t, name="add"
    )


def times(tape: Any, a: Any, b: Any) -> Node:
    """a b, entry by entry."""
    for one, other in ((a, b), (b, a)):
        if not isinstance(other, Node):
            return scaled(tape, one, float(other))
    return bilinear(tape, a, b, torch.mul, torch.broadcast_shapes(a.shape, b.shape), 1, "mul")
