"""A rigorous bound of a norm that is asked for again and again while the matrix moves a little."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wellposed._tree import LOW_PRECISION
from wellposed.linalg import spectral_norm_upper
from wellposed.linalg.scaling import ldexp_up, scaled

__all__ = ["NormBound"]

#: Covers the rounding of a difference, and of its norm summed in float64, for matrices of up to 2^30 entries.
_SLACK = 1.0 + 2.0**-20


class NormBound:
    """Upper bounds of |V|: one singular value decomposition now and then, one subtraction in between.

    |V| <= |V_0| + |V - V_0|_F, where V_0 is the matrix that was last decomposed. It is compared entry by entry, so no
    change goes unnoticed, whichever way it was made.
    """

    #: The matrix that was last decomposed and its bound: one value, so that threads never see one of them without the other.
    _known: tuple[Tensor, float] | None = None

    def __call__(self, V: Tensor, below: float) -> float:
        """An upper bound of |V|; a sharp one if a cheap one is not below `below`.

        Args:
            V: (m, k) finite.
            below: What the bound is compared with; 0 always asks for the sharp one.
        """
        V = V.detach()
        if self._known is not None:
            W, bound = self._known
            drift = _drift(V, W)
            if drift == 0.0:
                return bound
            cheap = math.nextafter(bound + drift, math.inf)
            if cheap < below:
                return cheap
        bound = spectral_norm_upper(V)
        self._known = V.clone(), bound
        return bound


def _drift(V: Tensor, W: Tensor) -> float:
    """Upper bound of |V - W|_F; 0 only if they are equal, and infinite if they cannot be compared."""
    if W.shape != V.shape or W.dtype != V.dtype or W.device != V.device:
        return math.inf
    if V.dtype in LOW_PRECISION:  # their differences are rounded by more than the slack covers
        V, W = V.float(), W.float()
    D, exponent = scaled((V - W).double())
    norm = float(torch.linalg.vector_norm(D))
    return ldexp_up(norm * _SLACK, exponent) if norm > 0 else 0.0
