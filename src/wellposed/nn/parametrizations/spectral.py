"""Matrices whose spectral norm stays below a bound."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from wellposed._tree import LOW_PRECISION
from wellposed.errors import InvalidArgument
from wellposed.solve import check_interval, transforms_active

__all__ = ["Spectral"]


class Spectral(nn.Module):
    r"""V -> V min(1, bound/|V|): a contraction, whatever the parameter V does.

    The norm is the largest singular value (O(m^3), once per solve), differentiated with it, so the map keeps every V inside
    the ball and projects the others onto it radially. A cell s(W z + ...) with a 1-Lipschitz s and |W| <= bound < 1 has
    exactly one equilibrium for every input, and plain iteration finds it at the rate `bound` or better.

    |W| <= bound is meant of the matrix as its dtype stores it: the ball is made smaller by an allowance for rounding, of
    (m + 8) eps for the computed norm (an assumption about the singular value decomposition, tested in more digits and not
    proved; `certify` bounds |W| anew) and eps' |V|_F/|V| <= eps' sqrt(m) for the entries, where eps' is that of the dtype and
    eps that of the computation, at least float32. So a V whose norm is nearer to the bound than that is shrunk, too. In
    float32 it is about 1e-5 of the bound at 100 units; in bfloat16 (eps' = 0.8 %) several per cent.

    Args:
        bound: In (0, 1).
    """

    def __init__(self, bound: float = 0.95) -> None:
        super().__init__()
        check_interval("Spectral", "bound", bound, low=0.0, high=1.0, closed="neither")
        self.bound = bound

    def forward(self, V: Tensor) -> Tensor:
        """(m, m) -> (m, m)."""
        if not transforms_active() and not bool(torch.isfinite(V).all()):
            wrong = V.numel() - int(torch.isfinite(V).sum())
            raise InvalidArgument(
                f"Spectral: {wrong} of {V.numel()} entries of the matrix are NaN or infinite. Go back to finite parameters and "
                "take a smaller step."
            )
        A = V.float() if V.dtype in LOW_PRECISION else V
        largest = A.detach().abs().amax()
        scale = torch.where(largest > 0, largest, torch.ones_like(largest))
        A = A / scale  # so that no square overflows or vanishes
        norm = torch.linalg.matrix_norm(A, ord=2)
        m, eps, stored = V.shape[0], torch.finfo(A.dtype).eps, torch.finfo(V.dtype)
        known = norm.detach().clamp(min=0.5)  # it is at least 1, that of the largest entry, unless V = 0
        entries = stored.eps * (torch.linalg.vector_norm(A.detach()) / known + m * stored.tiny / self.bound)
        allowance = (m + 8) * eps + entries
        inside = (known * (1 + allowance) * scale <= self.bound) | (largest == 0)
        projected = A * (self.bound * (1 - allowance) / norm.clamp(min=0.5))
        return torch.where(inside, V, projected.to(V.dtype))

    def extra_repr(self) -> str:
        return f"bound={self.bound}"
