"""The residual network of [nguyen2022, eq. (4.1)], and how far its iterates wander."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from wellposed.nn import ResidualDEQ
from wellposed.solve import Anderson

__all__ = ["residual", "wander"]


def residual(in_channels: int, channels: int, seed: int, **options: Any) -> ResidualDEQ:
    """With Anderson's solver, tolerance 1e-3 and 100 evaluations, as in [nguyen2022, Fig. 4.3]; the head averages over 7 x 7
    regions, because one average of few channels learns little.

    Args:
        in_channels, channels: Of images and of the state.
        seed: Of the parameters.
        options: As in `ResidualDEQ`.
    """
    chosen: dict[str, Any] = {"solver": Anderson(), "rtol": 1e-3, "max_steps": 100, "on_failure": "ignore", "grid": 7}
    return ResidualDEQ(in_channels, channels, 10, generator=torch.Generator().manual_seed(seed), **{**chosen, **options})


def wander(points: np.ndarray) -> float:
    """The way after the first step in units of the first step, on average: 0 for a single leap.

    Args:
        points: (steps, batch, features), NaN after a sample's last one.
    """
    ways = np.linalg.norm(np.diff(points, axis=0), axis=2)
    return float(np.mean(np.nansum(ways[1:], axis=0) / ways[0]))
