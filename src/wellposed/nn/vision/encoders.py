"""From images to what is injected into a cell; evaluated once for a solve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from wellposed._checks import check_positive_integer
from wellposed.nn.vision._modules import checked_channels, conv, norm

__all__ = ["ImageEncoder", "PyramidEncoder"]


class ImageEncoder(nn.Module):
    """x = norm(V * X), a 3 x 3 convolution and a group norm.

    Args:
        in_channels, channels: Of X and x.
        stride: Of the convolution.
        groups: Of the norm.
        generator, device, dtype: Of the weights.
    """

    def __init__(
        self,
        in_channels: int,
        channels: int,
        *,
        stride: int = 1,
        groups: int | None = None,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("in_channels", in_channels), ("channels", channels), ("stride", stride)):
            check_positive_integer("ImageEncoder", name, value)
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.in_channels = in_channels
        self.conv = conv(in_channels, channels, 3, std=None, stride=stride, generator=generator, **made)
        self.norm = norm(channels, groups, **made)

    def forward(self, X: Tensor) -> Tensor:
        """(batch, in_channels, H, W) -> (batch, channels, h, w)."""
        x: Tensor = self.norm(self.conv(X))
        return x


class PyramidEncoder(nn.Module):
    """x_1 = norm(V_1 * X), x_(i+1) = norm(V_(i+1) * relu(x_i)) with stride 2: one x for each resolution, finest first.

    Args:
        in_channels: Of X.
        channels: Of each x_i.
        stride: Of V_1.
        groups, generator, device, dtype: As in `ImageEncoder`.
    """

    def __init__(self, in_channels: int, channels: Sequence[int], *, stride: int = 1, **options: Any) -> None:
        super().__init__()
        check_positive_integer("PyramidEncoder", "in_channels", in_channels)
        channels = checked_channels("PyramidEncoder", channels)
        self.in_channels = in_channels
        widths = [in_channels, *channels]
        self.stages = nn.ModuleList(
            ImageEncoder(widths[i], widths[i + 1], stride=stride if i == 0 else 2, **options) for i in range(len(channels))
        )

    def forward(self, X: Tensor) -> tuple[Tensor, ...]:
        """(batch, in_channels, H, W) -> a tuple of (batch, channels_i, h_i, w_i)."""
        made: list[Tensor] = []
        for stage in self.stages:
            made.append(stage(torch.relu(made[-1]) if made else X))
        return tuple(made)
