r"""Activations as proximal operators: s = prox of a convex potential p.

    activation        s(v)              p(y)                                   slopes    prox of a p
    Identity          v                 0                                      {1}       v
    ReLU              max(v, 0)         0 on y >= 0                            [0, 1]    s(v)
    LeakyReLU(b)      max(v, b v)       (1/b - 1) y^2/2 on y < 0, else 0       [b, 1]    by cases
    SoftThreshold(t)  sgn(v)(|v| - t)+  t |y|                                  [0, 1]    with a t
    Tanh              tanh v            y artanh y + log(1 - y^2)/2 - y^2/2    [0, 1]    by (1)
    Sigmoid           1/(1 + e^-v)      y log y + (1-y) log(1-y) - y^2/2       [0, 1/4]  by (1)
    Softplus          log(1 + e^v)      Li_2(e^-y) - pi^2/6 on y >= 0          [0, 1]    by (1)

p is infinite outside the closed range of s and is fixed up to a constant. With y = s(w) and so
p'(y) = w - y, the equation y + a p'(y) = v of the prox reads

    (1 - a) s(w) + a w = v                                                                       (1)

whose left side increases in w. [winston2020, Table 1] has the potentials of ReLU, tanh, sigmoid and
softplus.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed._checks import check_interval
from wellposed.nn._activation import AbstractActivation, SmoothActivation


@dataclass(frozen=True)
class ReLU(AbstractActivation):
    """max(v, 0): the projection onto v >= 0. Its derivative at 0 is taken as 0, as in PyTorch."""

    def __call__(self, v: Tensor) -> Tensor:
        return torch.relu(v)

    def apply_(self, v: Tensor) -> Tensor:
        return v.relu_()

    def slope(self, y: Tensor) -> Tensor:
        return (y > 0).to(y.dtype)

    def prox(self, v: Tensor, step_size: float | Tensor) -> Tensor:
        return torch.relu(v)

    def reflect(self, v: Tensor, step_size: float) -> Tensor:
        return v.abs()

    def potential(self, y: Tensor) -> Tensor:
        return _indicator(y, y >= 0)

    def primitive(self, v: Tensor) -> Tensor:
        return torch.relu(v).square() / 2

    def conjugate(self, w: Tensor) -> Tensor:
        return _indicator(w, w <= 0)


@dataclass(frozen=True)
class LeakyReLU(AbstractActivation):
    """v where v >= 0, b v where v < 0. Its derivative at 0 is taken as b, as in PyTorch.

    Args:
        negative_slope: b, in (0, 1); for 0 use `ReLU`, for 1 `Identity`.
    """

    negative_slope: float = 0.01

    def __post_init__(self) -> None:
        check_interval("LeakyReLU", "negative_slope", self.negative_slope, low=0.0, high=1.0, closed="neither")

    def __call__(self, v: Tensor) -> Tensor:
        return torch.nn.functional.leaky_relu(v, self.negative_slope)

    def apply_(self, v: Tensor) -> Tensor:
        return torch.nn.functional.leaky_relu_(v, self.negative_slope)

    def slope(self, y: Tensor) -> Tensor:
        return torch.full_like(y, self.negative_slope).masked_fill_(y > 0, 1.0)

    def prox(self, v: Tensor, step_size: float | Tensor) -> Tensor:
        return torch.where(v >= 0, v, v / (1 + step_size * self._curvature))

    @property
    def _curvature(self) -> float:
        return 1 / self.negative_slope - 1

    @property
    def slope_bounds(self) -> tuple[float, float]:
        return self.negative_slope, 1.0

    def potential(self, y: Tensor) -> Tensor:
        return self._curvature / 2 * y.clamp(max=0).square()

    def primitive(self, v: Tensor) -> Tensor:
        return self(v) * v / 2

    def conjugate(self, w: Tensor) -> Tensor:
        return torch.where(w <= 0, w.square() / (2 * self._curvature), torch.inf)


@dataclass(frozen=True)
class SoftThreshold(AbstractActivation):
    """sgn(v) max(|v| - t, 0), for sparse equilibria. Its derivative at |v| = t is 0.

    Args:
        threshold: t, positive.
    """

    threshold: float = 0.1

    def __post_init__(self) -> None:
        check_interval("SoftThreshold", "threshold", self.threshold, low=0.0)

    def __call__(self, v: Tensor) -> Tensor:
        return torch.nn.functional.softshrink(v, self.threshold)

    def slope(self, y: Tensor) -> Tensor:
        return (y != 0).to(y.dtype)

    def prox(self, v: Tensor, step_size: float | Tensor) -> Tensor:
        return v.sgn() * (v.abs() - step_size * self.threshold).clamp(min=0)

    def potential(self, y: Tensor) -> Tensor:
        return self.threshold * y.abs()

    def primitive(self, v: Tensor) -> Tensor:
        return self(v).square() / 2

    def conjugate(self, w: Tensor) -> Tensor:
        return _indicator(w, w.abs() <= self.threshold)


@dataclass(frozen=True)
class Identity(AbstractActivation):
    """v itself: an affine cell, z = W z + U x + b. Its potential is 0."""

    def __call__(self, v: Tensor) -> Tensor:
        return v

    def apply_(self, v: Tensor) -> Tensor:
        return v

    def slope(self, y: Tensor) -> None:
        return None

    def prox(self, v: Tensor, step_size: float | Tensor) -> Tensor:
        return v

    @property
    def slope_bounds(self) -> tuple[float, float]:
        return 1.0, 1.0

    def potential(self, y: Tensor) -> Tensor:
        return torch.zeros_like(y)

    def primitive(self, v: Tensor) -> Tensor:
        return v.square() / 2

    def conjugate(self, w: Tensor) -> Tensor:
        return _indicator(w, w == 0)


@dataclass(frozen=True)
class Tanh(SmoothActivation):
    """tanh(v)."""

    def __call__(self, v: Tensor) -> Tensor:
        return torch.tanh(v)

    def apply_(self, v: Tensor) -> Tensor:
        return v.tanh_()

    def slope(self, y: Tensor) -> Tensor:
        return 1 - y * y

    def derivative(self, v: Tensor) -> Tensor:
        decay = torch.exp(-v.abs())  # 1/cosh^2 v, where the value has long been rounded to 1
        return (2 * decay / (1 + decay.square())).square()

    def potential(self, y: Tensor) -> Tensor:
        inside = y.clamp(-1, 1)  # y artanh y + log(1 - y^2)/2, in a form that is finite at the ends
        entropy = (torch.special.xlog1py(1 + inside, inside) + torch.special.xlog1py(1 - inside, -inside)) / 2
        return torch.where(y.abs() <= 1, entropy - y.square() / 2, torch.inf)

    def primitive(self, v: Tensor) -> Tensor:
        return v.abs() + torch.log1p(torch.exp(-2 * v.abs())) - math.log(2)  # log cosh v


@dataclass(frozen=True)
class Sigmoid(SmoothActivation):
    """1/(1 + exp(-v))."""

    def __call__(self, v: Tensor) -> Tensor:
        return torch.sigmoid(v)

    def apply_(self, v: Tensor) -> Tensor:
        return v.sigmoid_()

    def slope(self, y: Tensor) -> Tensor:
        return y * (1 - y)

    def derivative(self, v: Tensor) -> Tensor:
        return torch.sigmoid(v) * torch.sigmoid(-v)

    @property
    def slope_bounds(self) -> tuple[float, float]:
        return 0.0, 0.25

    def potential(self, y: Tensor) -> Tensor:
        inside = y.clamp(0, 1)
        entropy = torch.xlogy(inside, inside) + torch.special.xlog1py(1 - inside, -inside)
        return torch.where((y >= 0) & (y <= 1), entropy - y.square() / 2, torch.inf)

    def primitive(self, v: Tensor) -> Tensor:
        return torch.logaddexp(v, torch.zeros_like(v)) - math.log(2)


@dataclass(frozen=True)
class Softplus(SmoothActivation):
    """log(1 + exp(v)), without the threshold at which PyTorch's default turns linear.

    Args:
        centred: Whether c = log(2) is subtracted. The potential is then p(y + c) + c y.
    """

    centred: bool = False

    @property
    def _shift(self) -> float:
        return math.log(2) if self.centred else 0.0

    def __call__(self, v: Tensor) -> Tensor:
        return torch.logaddexp(v, torch.zeros_like(v)) - self._shift

    def slope(self, y: Tensor) -> Tensor:
        return -torch.expm1(-(y + self._shift))

    def _gap(self, w: Tensor, y: Tensor) -> Tensor:
        return self._shift - torch.logaddexp(-w, torch.zeros_like(w))  # without the cancellation of w - y

    def potential(self, y: Tensor) -> Tensor:
        """Li_2(e^-y) - pi^2/6, near 0 by Li_2(x) + Li_2(1-x) = pi^2/6 - log(x) log(1-x) (Euler)."""
        y = y + self._shift
        small = y.clamp(0, math.log(2))
        large = y.clamp(min=math.log(2))
        near = torch.xlogy(small, -torch.expm1(-small)) - _bernoulli_series(small)
        far = _bernoulli_series(-torch.log1p(-torch.exp(-large))) - math.pi**2 / 6
        return torch.where(y < 0, torch.inf, torch.where(y <= math.log(2), near, far)) + self._shift * (y - self._shift)

    def primitive(self, v: Tensor) -> Tensor:
        """-Li_2(-e^v) - pi^2/12 for v <= 0; softplus(t) = t + softplus(-t) gives the other half."""
        lower = -_bernoulli_series(-torch.logaddexp(-v.abs(), torch.zeros_like(v))) - math.pi**2 / 12
        return torch.where(v <= 0, lower, v.square() / 2 - lower) - self._shift * v

    def conjugate(self, w: Tensor) -> Tensor:
        w = w - self._shift
        below = w.clamp(max=0)  # p'(y) = log(1 - e^-y) = w, solved for y without a rounding to 0 or infinity
        y = torch.where(w < -1, -torch.log1p(-torch.exp(below)), -torch.log(-torch.expm1(below)))
        finite = w < 0
        y = torch.where(finite, y, 1.0) - self._shift
        limit = torch.where(w == 0, math.pi**2 / 6, torch.inf)  # -p(infinity) at w = 0
        return torch.where(finite, (w + self._shift) * y - self.potential(y), limit.to(w.dtype) - self._shift * w)


#: B_n / (n + 1)! of n = 0, 1, 2, 4, 6, ...: the odd Bernoulli numbers beyond B_1 vanish.
_BERNOULLI = (
    (1, 1.0),
    (2, -1 / 4),
    (3, 1 / 36),
    (5, -1 / 3600),
    (7, 1 / 211680),
    (9, -1 / 10886400),
    (11, 1 / 526901760),
    (13, -691 / 2730 / math.factorial(13)),
    (15, 7 / 6 / math.factorial(15)),
    (17, -3617 / 510 / math.factorial(17)),
)


def _bernoulli_series(u: Tensor) -> Tensor:
    r"""sum_n B_n u^(n+1)/(n+1)! = Li_2(1 - exp(-u)), to rounding for |u| <= log 2.

    There a term is less than (log 2/2 pi)^2 = 0.013 of the one before it.
    """
    total = torch.zeros_like(u)
    for power, coefficient in reversed(_BERNOULLI):
        total = total + coefficient * u**power
    return total


def _indicator(y: Tensor, inside: Tensor) -> Tensor:
    return torch.zeros_like(y).masked_fill(~inside, torch.inf)


#: One of each, with default parameters: the table at the top of this module.
ACTIVATIONS = (Identity(), ReLU(), LeakyReLU(), SoftThreshold(), Tanh(), Sigmoid(), Softplus())
