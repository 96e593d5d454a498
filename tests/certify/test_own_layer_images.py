"""Certificates of cells of images: groups of channels, and what is said of images of other sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wellposed as wp

DOUBLE = torch.float64


class Conv(nn.Module):
    """K z + x for a convolution K with all weights equal."""

    def __init__(self, conv: Any, weight: float) -> None:
        super().__init__()
        self.conv = conv.to(DOUBLE)
        nn.init.constant_(self.conv.weight, weight)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return self.conv(z) + x


@pytest.mark.parametrize("conv", [nn.Conv2d, nn.ConvTranspose2d])
def test_groups_of_channels_are_certified_at_an_input(conv: Any) -> None:
    layer = wp.EquilibriumLayer(Conv(conv(2, 2, 3, padding=1, groups=2), 0.05))
    found = wp.certify(layer, torch.randn(2, 2, 4, 4, dtype=DOUBLE))
    assert found.certified and float(found.error_bound.max()) < 1e-9  # type: ignore[attr-defined]  # a local certificate
