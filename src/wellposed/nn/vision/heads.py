"""From the state of an image network to classes: of the image, or of every pixel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from wellposed._checks import check_positive_integer
from wellposed.nn.vision._modules import checked_channels, conv, linear

__all__ = ["ClassificationHead", "SegmentationHead"]


class ClassificationHead(nn.Module):
    """Averages every resolution over a grid of regions, then one linear map: (batch, classes) logits.

    Args:
        channels: Of each resolution.
        classes: Number of logits.
        grid: Regions per side.
        generator, device, dtype: Of the weights.
    """

    def __init__(
        self,
        channels: Sequence[int],
        classes: int,
        *,
        grid: int = 1,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_positive_integer("ClassificationHead", "classes", classes)
        check_positive_integer("ClassificationHead", "grid", grid)
        channels = checked_channels("ClassificationHead", channels)
        self.pool = nn.AdaptiveAvgPool2d(grid)
        self.linear = linear(sum(channels) * grid**2, classes, generator=generator, device=device, dtype=dtype)

    def forward(self, z: Any, size: tuple[int, int]) -> Tensor:
        """States -> (batch, classes).

        Args:
            z: A tensor, or a tuple of resolutions.
            size: Of the images; not used.
        """
        parts = z if isinstance(z, tuple) else (z,)
        logits: Tensor = self.linear(torch.cat([self.pool(part).flatten(1) for part in parts], dim=1))
        return logits


class SegmentationHead(nn.Module):
    """Brings every resolution to the finest, a 1 x 1 convolution, then to the size of the image: (batch, classes, H, W).

    Args:
        channels, classes, generator, device, dtype: As in `ClassificationHead`.
    """

    def __init__(
        self,
        channels: Sequence[int],
        classes: int,
        *,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_positive_integer("SegmentationHead", "classes", classes)
        channels = checked_channels("SegmentationHead", channels)
        self.conv = conv(sum(channels), classes, 1, std=None, generator=generator, device=device, dtype=dtype)

    def forward(self, z: Any, size: tuple[int, int]) -> Tensor:
        """States -> (batch, classes, H, W).

        Args:
            z: A tensor, or a tuple of resolutions.
            size: (H, W) of the images.
        """
        parts = z if isinstance(z, tuple) else (z,)
        finest = parts[0].shape[2:]
        joined = torch.cat([nn.functional.interpolate(part, size=finest) for part in parts], dim=1)
        return nn.functional.interpolate(self.conv(joined), size=size, mode="bilinear", align_corners=False)
