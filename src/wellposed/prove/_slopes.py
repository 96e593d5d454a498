r"""What a proof knows of an activation: values with their errors, slopes, and bounds of
derivatives.

ReLU has no second derivative, and its slopes are exact as long as no pre-activation is near 0.
tanh and softplus have bounded second and third derivatives:

    tanh       |s''| <= 4/(3 sqrt 3) < 0.77,     |s'''| <= 2,                     s'' = -2 s s'
    softplus   |s''| <= 1/4,                     |s'''| <= 1/(6 sqrt 3) < 0.097,  s'' = s' (1 - s')

Their values are computed by the mathematical library, which is assumed to be right to 8 units in
the last place (the common ones are to 2).
"""

from __future__ import annotations

import abc
import math

import torch
from torch import Tensor

from wellposed.prove.error_free import UNIT

#: Assumed error of a value, slope or curvature, relative to the scale of its terms.
_LIBRARY = 8 * UNIT
#: How far beyond the present pre-activations, in their standard deviation, a reference of slopes reaches.
_REACH = 0.12


class AbstractSlopes(abc.ABC):
    """An activation with slopes in [0, 1]."""

    name: str
    shift = 0.0
    #: Bounds of |s''| and |s'''|; 0 for ReLU, whose slopes jump instead.
    most_curvature: float
    most_third: float
    smooth = True

    @abc.abstractmethod
    def value(self, V: Tensor) -> Tensor:
        """s(V)."""

    @abc.abstractmethod
    def slope(self, V: Tensor) -> Tensor:
        """s'(V), in [0, 1]."""

    @abc.abstractmethod
    def curvature(self, V: Tensor) -> Tensor:
        """s''(V)."""

    @abc.abstractmethod
    def curvature_ratio(self, V: Tensor) -> Tensor:
        """|s''(V)|/s'(V), where the Lipschitz constant of this ratio is at most 2."""

    @abc.abstractmethod
    def slopes_above(self, V: Tensor) -> Tensor:
        """Slopes that stay upper bounds while V moves a little."""

    def value_error(self, value: Tensor) -> Tensor:
        """Bounds of the rounding of `value(V)`, given that value."""
        return _LIBRARY * (value.abs() + 2 * self.shift)

    @property
    def slope_error(self) -> float:
        """Bound of the rounding of a slope or of half a curvature."""
        return 2 * _LIBRARY


class ReLUSlopes(AbstractSlopes):
    """max(v, 0)."""

    name, most_curvature, most_third, smooth = "relu", 0.0, 0.0, False

    def value(self, V: Tensor) -> Tensor:
        return torch.relu(V)

    def slope(self, V: Tensor) -> Tensor:
        return (V > 0).double()

    def curvature(self, V: Tensor) -> Tensor:
        return torch.zeros_like(V)

    def curvature_ratio(self, V: Tensor) -> Tensor:
        return torch.zeros_like(V)

    def slopes_above(self, V: Tensor) -> Tensor:
        return (V > -_REACH * float(V.std(correction=0))).double()

    def value_error(self, value: Tensor) -> Tensor:
        return torch.zeros_like(value)

    @property
    def slope_error(self) -> float:
        return 0.0


class TanhSlopes(AbstractSlopes):
    """tanh(v)."""

    name, most_curvature, most_third = "tanh", 0.77, 2.0

    def value(self, V: Tensor) -> Tensor:
        return torch.tanh(V)

    def slope(self, V: Tensor) -> Tensor:
        decay = torch.exp(-V.abs())
        return (2 * decay / (1 + decay.square())).square()

    def curvature(self, V: Tensor) -> Tensor:
        return -2 * torch.tanh(V) * self.slope(V)

    def curvature_ratio(self, V: Tensor) -> Tensor:
        return 2 * torch.tanh(V).abs()

    def slopes_above(self, V: Tensor) -> Tensor:
        return self.slope((V.abs() - _REACH * float(V.std(correction=0))).clamp(min=0.0))


class SoftplusSlopes(AbstractSlopes):
    """log(1 + e^v), less log(2) if it is centred."""

    name, most_curvature, most_third = "softplus", 0.25, 0.097

    def __init__(self, *, centred: bool) -> None:
        self.shift = math.log(2.0) if centred else 0.0

    def value(self, V: Tensor) -> Tensor:
        return torch.logaddexp(V, torch.zeros_like(V)) - self.shift

    def slope(self, V: Tensor) -> Tensor:
        return torch.sigmoid(V)

    def curvature(self, V: Tensor) -> Tensor:
        return torch.sigmoid(V) * torch.sigmoid(-V)

    def curvature_ratio(self, V: Tensor) -> Tensor:
        return torch.sigmoid(-V)

    def slopes_above(self, V: Tensor) -> Tensor:
        return self.slope(V + _REACH * float(V.std(correction=0)))
