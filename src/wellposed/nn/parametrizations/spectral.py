"""Matrices whose spectral norm stays below a bound."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from wellposed.nn.parametrizations._radial import radial
from wellposed.solve import check_interval

__all__ = ["Spectral"]


class Spectral(nn.Module):
    r"""V -> V min(1, bound/|V|): a contraction, whatever the parameter V does.

    The norm is the exact largest singular value (O(m^3), once per solve), differentiated with it, so the map keeps every V
    inside the ball and projects the others onto it radially. A cell s(W z + ...) with a 1-Lipschitz s and |W| <= bound < 1
    has exactly one equilibrium for every input, and plain iteration finds it at the rate `bound` or better.

    Args:
        bound: In (0, 1).
    """

    def __init__(self, bound: float = 0.95) -> None:
        super().__init__()
        check_interval("Spectral", "bound", bound, low=0.0, high=1.0, closed="neither")
        self.bound = bound

    def forward(self, V: Tensor) -> Tensor:
        """(m, m) -> (m, m)."""
        norm = torch.linalg.matrix_norm(V.float() if V.dtype in (torch.float16, torch.bfloat16) else V, ord=2)
        return radial(V, norm, self.bound)

    def extra_repr(self) -> str:
        return f"bound={self.bound}"
