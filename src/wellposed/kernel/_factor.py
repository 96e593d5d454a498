"""The Gaussian process of a kernel matrix by a Cholesky factor: an eigendecomposition costs some
fifteen times as much."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wellposed.kernel._matrix import nonnegative, sizes_of_terms


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

        def sizes() -> Tensor:
            weights = torch.linalg.solve_triangular(self._L.mT, half, upper=True)
            return sizes_of_terms(diagonal, cross, weights.mT, (self._L * self._L).sum())  # the trace of L L^T

        return cross @ self._weights, nonnegative(diagonal - (half * half).sum(dim=0), diagonal, sizes)

    def log_likelihood(self) -> Tensor:
        """log N(r; 0, H + noise I), summed over outputs."""
        n, outputs = self._r.shape
        half_log_determinant = self._L.diagonal().log().sum()
        return -(self._r * self._weights).sum() / 2 - outputs * (half_log_determinant + n * math.log(2 * math.pi) / 2)
