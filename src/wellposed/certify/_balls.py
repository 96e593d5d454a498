r"""Steps of a tape on a box of states: values, and difference quotients as an interval matrix.

Every quantity is a middle and a radius, entry by entry, in float64. For a linear step L, with |L|
the same with the absolute values of its coefficients, and sums of k terms in any order (Chapter 3
of [higham2002]),

    L(m +- r)  is in  fl(L m) +- (|L| r + gamma_k |L| |m|),                                      (1)

and products are bounded term by term. For two states v, w of the box a step s has

    s(v) - s(w) = Q (v - w)                                                                      (2)

with a matrix Q of quotients: L itself for a linear step; for an elementwise function a diagonal
with the quotients of `_functions`; for a product a1 b1 - a2 b2 = a1 (b1 - b2) + b2 (a1 - a2). They
compose by the chain rule, so no derivative need exist: a relu at its kink has quotients between 0
and 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from wellposed.certify._activations import PLAIN
from wellposed.certify._functions import TINY, ULPS, Function
from wellposed.certify._tape import Node, Tape
from wellposed.linalg.directed import ROUNDING

#: More than the rounding of radii, which are sums of up to 2^24 positive numbers.
SLACK = 1.0 + 2.0**-26


class Interval(NamedTuple):
    """Tensors of middles and radii."""

    mid: Tensor
    rad: Tensor


@dataclass(frozen=True)
class Ball:
    """The result of a step on a box.

    Attributes:
        value: Encloses the values.
        quotients: (n, *shape) encloses Q of (2), one row for each entry of the state; None if the
            result does not depend on it, or if it is not asked for.
    """

    value: Interval
    quotients: Interval | None = None


def gamma(terms: int) -> float:
    return (terms + 3) * ROUNDING * SLACK


class Boxes:
    """A tape on boxes of states; what does not depend on z is computed once.

    Args:
        tape: The steps.
    """

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self._fixed: dict[int, Ball] = {}
        self._varied: Node | None = None
        self._state = Ball(Interval(torch.empty(0), torch.empty(0)))

    def at(self, z: Tensor, radius: float = 0.0, *, quotients: bool = False) -> Ball:
        """The result on the box of all states that differ from z by at most the radius, entry by
        entry.

        Args:
            z: (n,) float64.
            radius: Of the box.
            quotients: Whether they are asked for.
        """
        n = z.numel()
        self._state = Ball(Interval(z, torch.full_like(z, radius)))
        if quotients:
            eye = torch.eye(n, dtype=torch.float64)
            self._state = Ball(self._state.value, Interval(eye, torch.zeros_like(eye)))
        with torch.no_grad():
            return self.tape.run(self)

    def varied(self, z: Tensor, radius: float, step: Node) -> Interval:
        """(p, *shape) encloses the derivatives of the result by the p entries of another step, on a
        box of states; what is detached has none.

        Args:
            z, radius: As for `at`.
            step: A constant or a part of x.
        """
        other = Boxes(self.tape)
        other._varied = step
        found = other.at(z, radius).quotients
        if found is None:  # the result does not depend on it
            zero = torch.zeros((step.shape.numel(), *self.tape.result.shape), dtype=torch.float64)
            return Interval(zero, zero)
        return found

    def interpret(self, step: Node, parents: tuple[Ball, ...]) -> Ball:
        if id(step) in self._fixed:
            return self._fixed[id(step)]
        ball = self._interpret(step, parents)
        if not step.of_z:
            self._fixed[id(step)] = ball
        return ball

    def _interpret(self, step: Node, parents: tuple[Ball, ...]) -> Ball:
        if step.kind == "state":
            value, q = self._state.value, self._state.quotients
            shaped = Interval(value.mid.reshape(step.shape), value.rad.reshape(step.shape))
            return Ball(shaped, None if q is None else Interval(q.mid.view(-1, *step.shape), q.rad.view(-1, *step.shape)))
        if step.value is not None:
            value64 = step.value.detach().double().cpu()  # exact
            ball = Ball(Interval(value64, torch.zeros_like(value64)))
            if step is not self._varied:
                return ball
            eye = torch.eye(value64.numel(), dtype=torch.float64).view(value64.numel(), *step.shape)
            return Ball(ball.value, Interval(eye, torch.zeros_like(eye)))
        if step.name == "detach" and self._varied is not None:
            return Ball(parents[0].value)
        if step.kind == "linear":
            assert step.apply is not None and step.absolute is not None
            return linear(parents, step.apply, step.absolute, step.terms)
        if step.kind == "bilinear":
            assert step.apply is not None
            return bilinear(parents[0], parents[1], step.apply, step.terms)
        if step.kind == "function":
            assert step.function is not None
            return elementwise(parents[0], step.function)
        return normalise(parents[0], step.epsilon)


def linear(parents: tuple[Ball, ...], apply: Callable[..., Tensor], absolute: Callable[..., Tensor], terms: int) -> Ball:
    """(1) for values and quotients."""
    values = linear_interval(tuple(parent.value for parent in parents), apply, absolute, terms)
    known = [parent.quotients for parent in parents if parent.quotients is not None]
    if not known:
        return Ball(values)
    n = known[0].mid.shape[0]
    full = tuple(_or_zero(parent, n) for parent in parents)
    return Ball(values, linear_interval(full, torch.vmap(apply), torch.vmap(absolute), terms))


def linear_interval(
    parents: tuple[Interval, ...], apply: Callable[..., Tensor], absolute: Callable[..., Tensor], terms: int
) -> Interval:
    mid = apply(*(parent.mid for parent in parents))
    if terms == 0:
        return Interval(mid, absolute(*(parent.rad for parent in parents)))
    g = gamma(terms)
    return Interval(mid, absolute(*(parent.rad + g * parent.mid.abs() for parent in parents)) * SLACK + TINY)


def _or_zero(ball: Ball, n: int) -> Interval:
    if ball.quotients is not None:
        return ball.quotients
    zero = torch.zeros((n, *ball.value.mid.shape), dtype=torch.float64)
    return Interval(zero, zero)


def bilinear(a: Ball, b: Ball, apply: Callable[[Tensor, Tensor], Tensor], terms: int) -> Ball:
    """The product, and a1 (b1 - b2) + b2 (a1 - a2)."""
    value = product(a.value, b.value, apply, terms)
    parts = []
    if a.quotients is not None:
        parts.append(product(a.quotients, b.value, torch.vmap(apply, in_dims=(0, None)), terms))
    if b.quotients is not None:
        parts.append(product(a.value, b.quotients, torch.vmap(apply, in_dims=(None, 0)), terms))
    if not parts:
        return Ball(value)
    if len(parts) == 1:
        return Ball(value, parts[0])
    return Ball(value, linear_interval((parts[0], parts[1]), torch.add, torch.add, 1))


def product(a: Interval, b: Interval, apply: Callable[[Tensor, Tensor], Tensor], terms: int) -> Interval:
    # |fl(a b) - a' b'| <= gamma |a| |b| + |a'-a| |b'| + |a| |b' - b|
    magnitude, g = b.mid.abs() + b.rad, gamma(terms)
    rad = apply(a.rad + g * a.mid.abs(), magnitude)
    if bool(b.rad.any()):
        rad = rad + apply(a.mid.abs(), b.rad)
    return Interval(apply(a.mid, b.mid), rad * SLACK + TINY)


def elementwise(a: Ball, function: Function) -> Ball:
    """s(m) +- (largest quotient) r, and the diagonal of quotients."""
    m, r = a.value
    low, high = function.slopes(m, r)
    middle = (low + high) / 2
    radius = torch.maximum(high - middle, middle - low) * SLACK + middle.abs() * 4 * ROUNDING + TINY
    value = function.value(m)
    rounding = torch.zeros_like(m) if function.exact else ULPS * (value.abs() + m.abs()) + TINY
    moved = torch.where(r > 0, (middle.abs() + radius) * r * SLACK, 0.0)  # 0 for a point, whatever the slopes
    found = Interval(value, moved + rounding)
    if a.quotients is None:
        return Ball(found)
    Q, R = a.quotients
    rad = (middle.abs() * R + radius * (Q.abs() + R) + 2 * ROUNDING * (middle * Q).abs()) * SLACK + TINY
    return Ball(found, Interval(middle * Q, rad))


def normalise(a: Ball, epsilon: float) -> Ball:
    """(v - mean v)/sqrt(mean (v - mean v)^2 + epsilon) over the last dimension."""
    size = a.value.mid.shape[-1]

    def mean(t: Tensor) -> Tensor:
        return t.mean(-1, keepdim=True)

    centred = linear((a,), lambda t: t - mean(t), lambda t: t + mean(t), size + 4)
    variance = linear((bilinear(centred, centred, torch.mul, 1),), mean, mean, size + 4)
    shift = torch.tensor(epsilon, dtype=torch.float64)
    constant = Ball(Interval(shift, torch.zeros_like(shift)))
    above = linear((variance, constant), torch.add, torch.add, 1)
    return bilinear(centred, elementwise(above, PLAIN["rsqrt"]), torch.mul, 1)
