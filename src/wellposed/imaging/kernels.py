"""Kernels of blurs."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wellposed._checks import check_interval, check_positive_integer
from wellposed.errors import InvalidArgument


def gaussian_kernel(sigma: float, size: int | None = None) -> Tensor:
    """(size, size) a Gaussian of sum 1.

    Args:
        sigma: Standard deviation in pixels.
        size: Odd; three standard deviations on each side if not given.

    Examples:
        >>> import torch, wellposed as wp
        >>> kernel = wp.imaging.gaussian_kernel(1.0)
        >>> kernel.shape, round(kernel.sum().item(), 4)
        (torch.Size([7, 7]), 1.0)
    """
    check_interval("gaussian_kernel", "sigma", sigma, low=0.0, closed="neither")
    size = 2 * math.ceil(3 * sigma) + 1 if size is None else size
    check_positive_integer("gaussian_kernel", "size", size)
    offsets = torch.arange(size, dtype=torch.float64) - (size - 1) / 2
    profile = torch.exp(-offsets.square() / (2 * sigma**2))
    kernel = torch.outer(profile, profile)
    return (kernel / kernel.sum()).float()


def motion_kernel(length: int, angle: float) -> Tensor:
    """(length, length) a straight motion during the exposure, of sum 1.

    Args:
        length: Of the path in pixels, odd.
        angle: In degrees, counted from the horizontal.

    Examples:
        >>> import torch, wellposed as wp
        >>> kernel = wp.imaging.motion_kernel(9, 30)
        >>> kernel.shape, round(kernel.sum().item(), 4)
        (torch.Size([9, 9]), 1.0)
    """
    check_positive_integer("motion_kernel", "length", length)
    if length % 2 == 0:
        raise InvalidArgument(f"The 'length' parameter of motion_kernel must be odd. Got {length} instead.")
    half, direction = (length - 1) / 2, math.radians(angle)
    along = torch.linspace(-half, half, 8 * length, dtype=torch.float64)
    rows, columns = half - along * math.sin(direction), half + along * math.cos(direction)
    kernel = torch.zeros(length, length, dtype=torch.float64)
    for row, column in ((rows.floor(), columns.floor()), (rows.floor() + 1, columns.floor()),
                        (rows.floor(), columns.floor() + 1), (rows.floor() + 1, columns.floor() + 1)):  # fmt: skip
        weight = (1 - (rows - row).abs()) * (1 - (columns - column).abs())  # bilinear
        inside = (row < length) & (column < length)
        kernel.index_put_((row[inside].long(), column[inside].long()), weight[inside], accumulate=True)
    return (kernel / kernel.sum()).float()
