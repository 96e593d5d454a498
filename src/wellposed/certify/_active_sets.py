r"""Which units can be active somewhere in a ball of parameters, and how much the recurrent matrix contracts on them.

A unit that is inactive at both of two equilibria contributes nothing to their difference. So for sample i, with S_i the units
that are active anywhere in the ball,

    |dz_i| <= |R'_{S_i S_i}| |dz_i| + |dR z_i| + |dc_i|,

and |R| may be replaced by max_i |R_{S_i S_i}|, which for a Gaussian R with half of the units active is about 0.7 |R|.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.linalg import spectral_norm_upper
from wellposed.linalg.verified_cholesky import norm_is_below

__all__ = ["Reach", "restricted_norm_upper"]

_POWER_STEPS = 24
_FLOOR = 2.0**-6


@dataclass(frozen=True)
class Reach:
    """How far pre-activations can move.

    Attributes:
        possible: (n, m) bool, units that may be active somewhere in the ball.
        sure: (n, m) bool, units that are active everywhere in the ball.
    """

    possible: Tensor
    sure: Tensor

    @property
    def flippable(self) -> Tensor:
        """(n, m) bool, units that may be active at one point of the ball and inactive at another."""
        return self.possible & ~self.sure

    @classmethod
    def of(cls, V: Tensor, reach: Tensor) -> Reach:
        """From pre-activations and upper bounds of how much each can change.

        Args:
            V: (n, m).
            reach: (n, m), or what broadcasts to it.
        """
        return cls(-reach <= V, reach < V)


def restricted_norm_upper(R: Tensor, possible: Tensor) -> float:
    """Upper bound of max_i |R_{S_i S_i}|.

    A power iteration for all samples guesses the largest, and a Cholesky test per sample proves it, or a guess a little
    higher. Costs about one product of the restricted matrix with itself per sample.

    Args:
        R: (m, m) float64.
        possible: (n, m) bool, the sets S_i.
    """
    whole = spectral_norm_upper(R)
    S = possible.to(R.dtype)
    v = S / torch.linalg.vector_norm(S, dim=1, keepdim=True).clamp(min=1.0)
    norms = v.new_zeros(v.shape[0])
    for _ in range(_POWER_STEPS):
        w = (v @ R.t()) * S
        norms = torch.linalg.vector_norm(w, dim=1)
        u = (w @ R) * S
        v = u / torch.linalg.vector_norm(u, dim=1, keepdim=True).clamp(min=1e-300)
    # a start that the matrix annihilates guesses 0, from where no factor leads up
    bound = min(whole, max(1.005 * float(norms.max()), _FLOOR * whole))
    # the hardest first: then the bound is not raised again and again
    for i in torch.argsort(norms, descending=True).tolist():
        index = possible[i].nonzero().squeeze(1)
        part = R[index][:, index].contiguous()
        growth = 1.01
        while bound < whole and not norm_is_below(part, bound):
            bound, growth = min(whole, bound * growth), growth**2
        if bound >= whole:
            return whole
    return bound
