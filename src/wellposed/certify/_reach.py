"""Which units may be active in a ball of parameters, and how small the adjoints of a sample can
become there."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.linalg.directed import ROUNDING, UNDERFLOW, down, row_norms_upper, vector_norm_upper

#: Steps of the conjugate gradients that look for a good w of `Steady`.
_GRADIENTS = 12


@dataclass(frozen=True)
class Reach:
    """(n, m) bool: units that may be active somewhere in the ball, and units that are active
    everywhere in it."""

    possible: Tensor
    sure: Tensor

    @property
    def flippable(self) -> Tensor:
        """Units that may be active at one point of the ball and inactive at another."""
        return self.possible & ~self.sure


@dataclass(frozen=True)
class Steady:
    r"""Lower bounds of the adjoints: on the units Q that are active everywhere in a ball,

        p_Q = v_Q + (R^T p)_Q,     hence     |p| >= w . v_Q/|(w - R w) on S|

    for every w on Q, where S are the units that may be active, outside of which p is 0.

    Attributes:
        gained: (n,) lower bounds of w . v, for one w of each sample.
        size, spread: (n,) upper bounds of |w| and of |(w - R w) on S|.
    """

    gained: Tensor
    size: Tensor
    spread: Tensor

    @classmethod
    def of(cls, R: Tensor, v: Tensor, reach: Reach) -> Steady:
        """The best w has B^T B w = v on the sure units, B = (I - R) from sure to possible ones: a
        few conjugate gradients come near, and whatever they find serves."""
        S, Q = reach.possible.to(R.dtype), reach.sure.to(R.dtype)
        w, residual = torch.zeros_like(Q), v * Q
        direction, square = residual, residual.square().sum(dim=1, keepdim=True)
        for _ in range(_GRADIENTS):
            image = S * (direction - direction @ R.t())
            step = square / image.square().sum(dim=1, keepdim=True).clamp(min=1e-300)
            w, residual = w + step * direction, residual - step * Q * (image - image @ R)
            square, before = residual.square().sum(dim=1, keepdim=True), square
            direction = residual + square / before.clamp(min=1e-300) * direction
        size = row_norms_upper(w)
        rounding = 4 * (R.shape[0] + 4) * ROUNDING * size
        gained = (w * v).sum(dim=1) - rounding * vector_norm_upper(v)
        spread = row_norms_upper(S * (w - w @ R.t())) + rounding * (1 + vector_norm_upper(R))
        return cls(gained, size, spread)

    def least(self, readout: float, recurrent: float) -> float:
        """Lower bound of min |p_i| where the read-out moves by at most `readout` and R by
        `recurrent`."""
        bounds = (self.gained - readout * self.size) / (self.spread + recurrent * self.size + UNDERFLOW)
        return max(0.0, down(float(bounds.min())))
