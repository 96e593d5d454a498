"""The Gaussian process of a kernel matrix by a Cholesky factor: an eigendecomposition costs some
fifteen times as much."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class NoisyFactor:
    """The Cholesky factor of H + noise I, and what follows from it.

    Args:
        H: (n, n) symmetric and positive definite.
        r: (n, outputs) targets less the prior mean.
        noise: At least 0.
    """

    def __init__(self, H: Tensor, r: Tensor, noise: float | Tensor) -> None:
        noisy = H.clone()
        noisy.diagonal().add_(noise)
        self.noise, self._r = noise, r
        self._L = torch.linalg.cholesky(noisy)
        self._weights = torch.cholesky_solve(r, self._L)

    def posterior(self, cross: Tensor, diagonal: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (p, outputs) less its prior, and variance (p,), given the kernels (p, n) of new with
        training inputs and (p,) of new inputs with themselves."""
        half = torch.linalg.solve_triangular(self._L, cross.mT, upper=False)
        return cross @ self._weights, (diagonal - (half * half).sum(dim=0)).clamp(min=0.0)

    def log_likelihood(self) -> Tensor:
        """log N(r; 0, H + noise I), summed over outputs."""
        n, outputs = self._r.shape
        half_log_determinant = self._L.diagonal().log().sum()
        return -(self._r * self._weights).sum() / 2 - outputs * (half_log_determinant + n * math.log(2 * math.pi) / 2)
