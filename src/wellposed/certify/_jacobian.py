"""The Jacobian of the predictions at a measured point, and the error of the vectors it is made
of."""

from __future__ import annotations

import math

import torch

from wellposed.certify.measurement import Measurement
from wellposed.linalg import least_eigenvalue_lower, spectral_norm_upper
from wellposed.linalg.directed import ROUNDING, down, row_norms_upper, up, vector_norm_upper

#: What underflow takes away from a Gram matrix: 2^-1074 from each product, times what multiplies it.
_GRAM_UNDERFLOW = 2.0**-560


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

    def _gram(self, h: float, side: int) -> torch.Tensor:
        """(n, n) with k and l bounded from below (side 0) or above (side 1)."""
        G, PP, XX = self._parts
        recurrent, injected = (scale[side] for scale in self._scales)
        K = h * PP * (recurrent**2 * G + injected**2 * XX)
        if self._readout:
            K = K + G
        return (K + K.t()) / 2
