"""Numbers that speak for or against one equilibrium and prove nothing; and starts from which others
may be found."""

from __future__ import annotations

import torch
from torch import Tensor

from wellposed.linalg import spectral_radius_estimate

#: Random starts, in addition to those of the solver.
STARTS = 4


def linearised(J: Tensor) -> tuple[float, float]:
    """Estimates of the spectral radius of J and of the least singular value of I - J.

    Args:
        J: (n, n) float64.
    """
    if not bool(torch.isfinite(J).all()):
        return float("nan"), float("nan")
    radius = float(spectral_radius_estimate(J))
    least = float(torch.linalg.svdvals(torch.eye(len(J), dtype=J.dtype) - J)[-1])
    return radius, least


def starts(z: Tensor) -> list[Tensor]:
    """Points from which another equilibrium may be found: mirrored, large and small, and random.

    Args:
        z: (batch, n) equilibria that were found.
    """
    generator = torch.Generator().manual_seed(0)
    size = torch.nan_to_num(z.abs().amax(dim=1, keepdim=True), nan=1.0, posinf=1.0).clamp(min=1.0)
    drawn = [
        torch.randn(z.shape, generator=generator, dtype=torch.float64).to(z) * size * scale for scale in (0.5, 1.0, 2.0, 4.0)
    ]
    return [-torch.nan_to_num(z), *drawn[:STARTS]]
