r"""A tape for all states and inputs at once: Lipschitz constants of compositions, and ranges.

For two states v, w and the same x every step s has |s(v) - s(w)| <= L |v - w|, with

    linear step:      L = sum over its parents of |A_i| L_i (root of squares where results lie side
                      by side), |A|^2 <= (largest row sum of |A|) (largest column sum of |A|)    (1)
    matrix, kernel:   its spectral norm; a convolution by its symbol, for images of every size
    function:         the largest |quotient| on the range of its argument
    product a b:      L = sup|a| L_b + sup|b| L_a
    normalisation:    L/sqrt(epsilon), since d/dv of v/sqrt(|v|^2/k + e) is at most 1/sqrt(e)

Each is rounded upward. A constant is an interval, since it may have been computed from parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.certify._balls import SLACK, Ball, Boxes
from wellposed.certify._tape import Node, Tape
from wellposed.linalg import spectral_norm_upper
from wellposed.linalg.directed import up, vector_norm_upper
from wellposed.nn.parametrizations import conv_norm_upper

#: Why nothing is proved with a constant such as log 0 or 0/0.
NOT_FINITE = "A constant of the cell, or what it computes from parameters, has NaN or infinite entries."


@dataclass(frozen=True)
class Bound:
    """What is known of a step for all states and inputs.

    Attributes:
        lipschitz: L.
        low, high: Bounds of all entries.
        ball: Of a constant, its enclosure.
    """

    lipschitz: float
    low: float = -math.inf
    high: float = math.inf
    ball: Ball | None = None

    @property
    def largest(self) -> float:
        """Bounds |entry|."""
        return max(abs(self.low), abs(self.high))


def of_product(a: float, b: float) -> float:
    """a b from above, and 0 if one of them is 0: what does not move is not magnified."""
    return 0.0 if a == 0 or b == 0 else up(a * b)


def _plain(a: float, b: float) -> float:
    return 0.0 if a == 0 or b == 0 else a * b


class Lipschitz:
    """Interprets steps as `Bound`s.

    Args:
        tape: The steps.

    Attributes:
        every_size: Whether nothing in the proof depends on the size of the images.
        finite: Whether every step is finite for all states and inputs, in exact arithmetic.
        remarks: What functions and constants say about statements for all arguments.
    """

    def __init__(self, tape: Tape) -> None:
        self._boxes = Boxes(tape)
        self.every_size = self.finite = True
        self.remarks: list[str] = []

    def interpret(self, step: Node, parents: tuple[Bound, ...]) -> Bound:
        if not step.of_z and not step.of_x:
            balls = tuple(parent.ball for parent in parents if parent.ball is not None)
            ball = self._boxes.interpret(step, balls)
            mid, rad = ball.value
            if not bool(torch.isfinite(mid).all()):
                self.remarks.append(NOT_FINITE)
            ends = (mid - rad, mid + rad) if mid.numel() else (torch.zeros(1), torch.zeros(1))
            return Bound(0.0, -up(-float(ends[0].min())), up(float(ends[1].max())), ball)
        if not step.shape.numel():  # an empty slice, which has no entry to bound
            return Bound(0.0, 0.0, 0.0)
        if step.kind == "state":
            return Bound(1.0)
        if step.kind == "linear":
            return self._linear(step, parents)
        if step.kind == "bilinear":
            return self._bilinear(step, *parents)
        if step.kind == "function":
            return self._function(step, parents[0])
        if step.kind == "normalise":
            size = math.sqrt(step.shape[-1]) * SLACK if step.epsilon >= 0 else math.inf
            self.finite = self.finite and step.epsilon > 0
            L = up(parents[0].lipschitz / math.sqrt(step.epsilon)) if step.epsilon > 0 else math.inf
            self.every_size = False
            return Bound(0.0 if parents[0].lipschitz == 0 else L, -size, size)
        self.finite = self.finite and step.kind == "data"  # what is computed by log, say, need not be
        return Bound(0.0)  # any number

    def _function(self, step: Node, a: Bound) -> Bound:
        function = step.function
        assert function is not None
        if function.remark and step.of_z:
            self.remarks.append(function.remark)
        self.finite = self.finite and _is_defined(step.name, a)
        least, largest = function.slopes_on(a.low, a.high)
        return Bound(of_product(max(abs(least), abs(largest)), a.lipschitz), *function.values_on(a.low, a.high))

    def _linear(self, step: Node, parents: tuple[Bound, ...]) -> Bound:
        norms, rows = zip(*(norm_of_linear(step, i) for i in range(len(parents))), strict=True)
        if step.of_z and (step.name in ("sum", "cat") or (step.name == "move" and max(norms) > 1.1)):
            self.every_size = False
        parts = [of_product(norm, parent.lipschitz) for norm, parent in zip(norms, parents, strict=True)]
        L = up(math.hypot(*parts)) if step.name == "cat" else up(sum(parts)) if any(parts) else 0.0
        if step.name == "cat":
            return Bound(L, min(p.low for p in parents), max(p.high for p in parents))
        low = high = 0.0
        for parent, row, sign in zip(parents, rows, _signs(step), strict=True):
            ends = sorted((sign * _plain(row, parent.low), sign * _plain(row, parent.high)))
            whole = step.name == "add" or step.name.startswith("scale")
            low, high = low + (ends[0] if whole else min(0.0, ends[0])), high + (ends[1] if whole else max(0.0, ends[1]))
        return Bound(L, -up(-low), up(high))

    def _bilinear(self, step: Node, a: Bound, b: Bound) -> Bound:
        if step.name == "mul":
            spread = [math.sqrt(step.shape.numel() / max(1, parent.shape.numel())) * SLACK for parent in step.parents]
            L = of_product(of_product(a.lipschitz, b.largest), spread[0])
            L = up(L + of_product(of_product(b.lipschitz, a.largest), spread[1]))
            ends = [_plain(s, t) for s in (a.low, a.high) for t in (b.low, b.high)]
            return Bound(L, -up(-min(ends)), up(max(ends)))
        if b.ball is not None:
            return Bound(of_product(norm_of_product(step, b.ball, 1), a.lipschitz), *_extent(step, a, b.ball, 0))
        if a.ball is not None:
            return Bound(of_product(norm_of_product(step, a.ball, 0), b.lipschitz), *_extent(step, b, a.ball, 1))
        return Bound(0.0 if a.lipschitz == b.lipschitz == 0 else math.inf)


def _is_defined(name: str, a: Bound) -> bool:
    """Whether a function is finite at all arguments within these bounds."""
    if name == "reciprocal":
        return a.low > 0 or a.high < 0
    return a.low > 0 if name == "rsqrt" else a.low >= 0 if name == "sqrt" else True


def _signs(step: Node) -> list[float]:
    """The sign of each parent in a linear step."""
    assert step.apply is not None
    if step.name == "add":
        one = torch.ones(())
        return [1.0, float(step.apply(0 * one, one))]
    if step.name.startswith("scale"):
        return [math.copysign(1.0, float(step.name.removeprefix("scale ")))]
    return [1.0] * len(step.parents)


def norm_of_linear(step: Node, which: int) -> tuple[float, float]:
    """Upper bounds of the norm of a linear step in one parent, by (1), and of its row sums.

    The row sums of a sum and of a scaling are their coefficients, and exact.
    """
    if step.name == "add" and step.parents[which].shape == step.shape:
        return 1.0, 1.0
    if step.name.startswith("scale "):
        factor = abs(float(step.name.removeprefix("scale ")))
        return up(factor), factor
    absolute = step.absolute
    assert absolute is not None
    zeros = [torch.zeros(parent.shape, dtype=torch.float64) for parent in step.parents]
    with torch.enable_grad():
        ones = torch.ones(step.parents[which].shape, dtype=torch.float64, requires_grad=True)
        rows = absolute(*zeros[:which], ones, *zeros[which + 1 :])
        assert not rows.is_inference()  # of which nothing has a derivative
        if not rows.requires_grad or not rows.numel() or not ones.numel():
            return 0.0, 0.0
        (columns,) = torch.autograd.grad(rows.sum(), ones)
    largest = float(rows.detach().max()), float(columns.max())
    if largest == (1.0, 1.0):
        return 1.0, 1.0
    return up(math.sqrt(largest[0] * largest[1]) * SLACK), 1.0 if step.name == "add" else up(largest[0] * SLACK)


def _extent(step: Node, moving: Bound, fixed: Ball, which: int) -> tuple[float, float]:
    """Bounds of the entries of a product with a constant."""
    if not math.isfinite(moving.largest):
        return -math.inf, math.inf
    assert step.apply is not None
    magnitude = fixed.value.mid.abs() + fixed.value.rad
    if step.name.startswith("convolution") and which == 0:  # all weights of a result, which small images do not reach
        sums = [_sums_of_results(part, "transposed" in step.name) for part in magnitude.chunk(_groups(step))]
        largest = up(float(torch.cat(sums).max()) * moving.largest * SLACK)
        return -largest, largest
    size = torch.full(step.parents[which].shape, moving.largest, dtype=torch.float64)
    out = step.apply(size, magnitude) if which == 0 else step.apply(magnitude, size)
    largest = up(float(out.max()) * SLACK) if out.numel() else 0.0
    return -largest, largest


def norm_of_product(step: Node, fixed: Ball, which: int) -> float:
    """Upper bound of the norm of a product with a constant, as a map of the other factor.

    Args:
        step: The product.
        fixed: The constant.
        which: 1 if it is the second factor.
    """
    mid, rad = fixed.value
    if not mid.numel():
        return 0.0
    if not bool(torch.isfinite(mid).all()):
        return math.inf
    if step.name == "mm" and mid.dim() >= 2:
        blocks = mid.reshape(-1, *mid.shape[-2:])
        return up(max(spectral_norm_upper(block) for block in blocks) + vector_norm_upper(rad))
    if step.name.startswith("convolution") and which == 1:  # a transposed one is the adjoint, of the same norm
        return up(max(_kernel_norm(part) for part in mid.chunk(_groups(step))) + vector_norm_upper(rad) * rad.numel())
    return _by_sums(step, mid.abs() + rad, which)


def _groups(step: Node) -> int:
    return int(step.name.split()[-1])


def _sums_of_results(kernel: Tensor, transposed: bool) -> Tensor:
    """(channels,) the sum of all weights of one group that lead to a channel of the result."""
    return kernel.flatten(2).sum(dim=(0, 2) if transposed else (1, 2))


def _by_sums(step: Node, magnitude: Tensor, which: int) -> float:
    """(1) for a product with a constant."""
    apply = step.apply
    assert apply is not None
    with torch.enable_grad():
        ones = torch.ones(step.parents[1 - which].shape, dtype=torch.float64, requires_grad=True)
        rows = apply(ones, magnitude) if which == 1 else apply(magnitude, ones)
        (columns,) = torch.autograd.grad(rows.sum(), ones)
    return up(math.sqrt(float(rows.detach().max()) * float(columns.max())) * SLACK)


def _kernel_norm(kernel: Tensor) -> float:
    """Upper bound of the norm of a convolution, for images of every size, any stride, dilation and
    zeros around.

    A stride keeps some of the results, a dilation only renames frequencies; zeros around the kernel
    make it square with an odd side.
    """
    K = kernel.reshape(*kernel.shape[:2], *(1,) * (4 - kernel.dim()), *kernel.shape[2:]) if kernel.dim() < 5 else None
    taps = kernel.reshape(*kernel.shape[:2], -1).permute(2, 0, 1)
    by_taps = up(sum(spectral_norm_upper(tap) for tap in taps))
    if K is None:
        return by_taps
    side = max(K.shape[2:])
    side += 1 - side % 2
    square = torch.nn.functional.pad(K, (0, side - K.shape[3], 0, side - K.shape[2]))
    # the eigenvalues behind it are right to a relative 1e-12 or so, for which 1e-9 is allowed
    return min(by_taps, up(float(conv_norm_upper(square, grid=max(24, 4 * side))) * (1 + 1e-9)))
