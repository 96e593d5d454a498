"""The Jacobian of the predictions at a measured point with the error of its adjoints, and what
holds for them in a ball: which units may be active there, and how small an adjoint can become."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.certify.measurement import Measurement
from wellposed.linalg import least_eigenvalue_lower, spectral_norm_upper
from wellposed.linalg.directed import ROUNDING, UNDERFLOW, down, row_norms_upper, up, vector_norm_upper

#: What underflow takes away from a Gram matrix: 2^-1074 from each product, times what multiplies it.
_GRAM_UNDERFLOW = 2.0**-560
#: Steps of the conjugate gradients that look for a good w of `Steady`.
_GRADIENTS = 12


class FoundJacobian:
    r"""J with rows (z_i, sqrt(h) k p_i (x) z_i, sqrt(h) l p_i (x) x_i), of the vectors z_i and p_i
    that were found.

    J J^T = Z Z^T + h (P P^T) o (k^2 Z Z^T + l^2 X X^T); without a read-out that is trained the
    first term is absent.

    Args:
        point: The measurement.
        readout: Whether the read-out is trained.
        scales: (lower, upper) bounds of k, and of l.

    Attributes:
        norms: (n,) upper bounds of |p_i|, p_i on the units that are active: what was found
            elsewhere counts as its error.
        back: (n, m) v + R^T p_i.
        residual: (n,) upper bounds of |D_i (v + R^T p_i) - p_i|, D_i the masks that were found.
        is_zero: Whether J is 0.
    """

    def __init__(self, point: Measurement, *, readout: bool, scales: tuple[tuple[float, float], tuple[float, float]]) -> None:
        self._readout, self._scales = readout, scales
        with torch.no_grad():
            R, v, X = point.model.recurrent().detach(), point.model.readout_weight().detach(), point.X
            mask = (point.V > 0).to(point.P.dtype)
            P = point.P * mask
            self.norms = row_norms_upper(P)
            # an entry of a product with m terms is wrong by at most gamma_m |row| |column|: gamma |Z|_F^2 in Frobenius norm
            rounding = 8 * (point.Z.shape[1] + X.shape[1] + 4) * ROUNDING
            z, p = vector_norm_upper(point.Z) ** 2, vector_norm_upper(P) ** 2
            (_, recurrent), (_, injected) = scales
            self._gram_error = up(rounding * (z + p * (recurrent**2 * z + injected**2 * point.X_norm_F**2)) + _GRAM_UNDERFLOW)
            self._parts = (point.Z @ point.Z.t(), P @ P.t(), X @ X.t())
            self.is_zero = not bool(point.Z.any()) or not (readout or bool(P.any()))
            # the adjoint that was found, against the one of the masks that were found
            self.back = v + P @ R
            residual = row_norms_upper(mask * self.back - P)
            alpha, size = vector_norm_upper(v), vector_norm_upper(R)  # |fl(R^T p) - R^T p| <= gamma_m |R|_F |p|
            self.residual = residual + rounding * (alpha + max(1.0, size) * self.norms)
        self._least_at: dict[float, float] = {}

    def least(self, h: float) -> float:
        """Lower bound of sigma_min(J) over its n rows, or 0."""
        if h not in self._least_at:
            lower = least_eigenvalue_lower(self._gram(h, 0)) - max(1.0, h) * self._gram_error
            self._least_at[h] = math.sqrt(down(lower)) if lower > 0 else 0.0
        return self._least_at[h]

    def largest(self, h: float) -> float:
        """Upper bound of |J|."""
        return up(math.sqrt(up(spectral_norm_upper(self._gram(h, 1)) + max(1.0, h) * self._gram_error)))

    def _gram(self, h: float, side: int) -> Tensor:
        """(n, n) with k and l bounded from below (side 0) or above (side 1)."""
        G, PP, XX = self._parts
        recurrent, injected = (scale[side] for scale in self._scales)
        K = h * PP * (recurrent**2 * G + injected**2 * XX)
        if self._readout:
            K = K + G
        return (K + K.t()) / 2


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
