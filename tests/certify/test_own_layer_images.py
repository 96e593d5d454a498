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


class Resized(Conv):
    """A part of it has 8 x 8 pixels, whatever the image has."""

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        small = self.conv(nn.functional.interpolate(z, size=8))
        return nn.functional.interpolate(small, size=z.shape[-2:]) + x


class Places(Conv):
    """Pixels have a weight by their place."""

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return self.conv(z) * torch.arange(z.shape[-1], dtype=z.dtype) / 10 + x


class Counted(Conv):
    """Pixels are counted."""

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return self.conv(z) * (z.shape[-1] / 10) + x


class Steep(Conv):
    """The slope of exp depends on how many results of a convolution an image has room for."""

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return 0.15 * torch.exp(self.conv(torch.tanh(z))) + x


WIDE = {"padding": 12, "dilation": 12, "bias": False}  # of a kernel of 3 x 3 images of 8 x 8 see the middle


@pytest.mark.parametrize(
    "cell",
    [
        Conv(nn.ConvTranspose2d(1, 1, 3, **WIDE), 0.5),
        Steep(nn.Conv2d(1, 1, 3, **WIDE), 0.4),
        Steep(nn.ConvTranspose2d(1, 1, 3, **WIDE), 0.4),
        Resized(nn.Conv2d(1, 1, 1), 0.9),
        Places(nn.Conv2d(1, 1, 1), 0.9),
        Counted(nn.Conv2d(1, 1, 1), 0.9),
    ],
)
def test_what_contracts_for_small_images_alone_is_not_certified_for_every_size(cell: Conv) -> None:
    found = wp.certify(wp.EquilibriumLayer(cell))
    z = torch.full((1, 1, 40, 40), 0.8, dtype=DOUBLE)
    everywhere, some = 1e-3 * torch.ones_like(z), torch.zeros_like(z)
    some[..., ::5, ::5] = 1e-3
    quotients = [float((cell(z + d, 0 * z) - cell(z, 0 * z)).detach().norm() / d.norm()) for d in (everywhere, some)]
    assert max(quotients) > 1  # it does not contract
    assert not found.certified or "x of shape (batch, 1, 8, 8)" in found.licenses[0]


def test_a_transposed_convolution_is_certified_for_images_of_every_size() -> None:
    found = wp.certify(wp.EquilibriumLayer(Conv(nn.ConvTranspose2d(2, 2, 3, padding=1, groups=2), 0.1)))
    assert found.certified and "x of shape (batch, 2, any, any) in float64" in found.licenses[0]
    assert found.hypotheses[0].value == pytest.approx(0.9, rel=0.1) and "images of other sizes" in found.note
