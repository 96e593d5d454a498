"""A rigorous bound of a norm that is asked for again and again while the matrix moves a little."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wellposed._tree import LOW_PRECISION
from wellposed.linalg import spectral_norm_upper

__all__ = ["NormBound"]

#: Covers the rounding of a difference, and of its norm summed in float64, for matrices of up to 2^30 entries.
_SLACK = 1.0 + 2.0**-20


class NormBound:
    """Upper bounds of |V|: one singular value decomposition now and then, one subtraction in between.

    |V| <= |V_0| + |V - V_0|_F, where V_0 is the matrix that was last decomposed. It is compared entry by entry, so no
    change goes unnoticed, whichever way it was made.
    """

    def __init__(self) -> None:
        self._reference: Tensor | None = None
        self._bound = math.inf

    def __call__(self, V: Tensor, below: float) -> float:
        """An upper bound of |V|; a sharp one if a cheap one is not below `below`.

        Args:
            V: (m, k) finite.
            below: What the bound is compared with; 0 always asks for the sharp one.
        """
        V = V.detach()
        drift = self._drift(V)
        if drift == 0.0:
            return self._bound
        cheap = math.nextafter(self._bound + drift, math.inf)
        if cheap < below:
            return cheap
        self._reference, self._bound = V.clone(), spectral_norm_upper(V)
        return self._bound

    def _drift(self, V: Tensor) -> float:
        W = self._reference
        if W is None or W.shape != V.shape or W.dtype != V.dtype or W.device != V.device:
            return math.inf
        if V.dtype in LOW_PRECISION:  # their differences are rounded by more than the slack covers
            V, W = V.float(), W.float()
        return float(torch.linalg.vector_norm(V - W, dtype=torch.float64)) * _SLACK
