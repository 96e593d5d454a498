"""Convolutions and linear maps that are drawn from a generator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, skip_init

from wellposed._checks import check_positive_integer
from wellposed.errors import InvalidArgument

__all__ = ["checked_channels", "conv", "linear", "norm"]


def checked_channels(owner: str, channels: Any) -> tuple[int, ...]:
    """The channels of each resolution; raises unless there is one positive integer for each, and at least one."""
    if not isinstance(channels, Sequence) or isinstance(channels, str) or not channels:
        hint = f" For one resolution give ({channels},)." if type(channels) is int else ""
        raise InvalidArgument(
            f"The 'channels' parameter of {owner} must be a tuple with the channels of at least one resolution, finest first. "
            f"Got {channels!r} instead.{hint}"
        )
    for number in channels:
        check_positive_integer(owner, "channels", number)
    return tuple(channels)


def conv(
    in_channels: int,
    out_channels: int,
    kernel_size: int,
    *,
    std: float | None,
    generator: torch.Generator | None,
    stride: int = 1,
    weight_norm: bool = False,
    **made: Any,
) -> nn.Module:
    """A convolution without bias that keeps the size (up to the stride), with normal weights.

    Args:
        in_channels, out_channels, kernel_size, stride: As in torch.
        std: Of the weights; None takes 1/sqrt(fan-in), which keeps the size of the values.
        generator: Draws them.
        weight_norm: Whether the weight is g v/|v|, filter by filter [salimans2016]. It is a function of parameters only, so
            that it is the same at every evaluation of a solve.
        made: device, dtype.
    """
    shape = (in_channels, out_channels, kernel_size)
    module = skip_init(nn.Conv2d, *shape, stride=stride, padding=kernel_size // 2, bias=False, **_placed(made))
    std = 1 / math.sqrt(in_channels * kernel_size**2) if std is None else std
    with torch.no_grad():
        module.weight.normal_(0.0, std, generator=generator)
    return parametrizations.weight_norm(module) if weight_norm else module


def linear(in_features: int, out_features: int, *, generator: torch.Generator | None, **made: Any) -> nn.Linear:
    """A linear read-out with weights of variance 1/fan-in and zero bias."""
    module: nn.Linear = skip_init(nn.Linear, in_features, out_features, **_placed(made))
    with torch.no_grad():
        module.weight.normal_(0.0, 1 / math.sqrt(in_features), generator=generator)
        module.bias.zero_()
    return module


def norm(channels: int, groups: int | None, **made: Any) -> nn.GroupNorm:
    """Group normalization: over the pixels and channels of a group of one sample, so it never mixes samples.

    Args:
        channels: How many.
        groups: How many (their greatest common divisor with the channels is used); None takes as many as leave four channels
            or more in each, at most eight. A group of one channel would fix the mean of that channel over the image, and
            with it all that a head sees that averages over images.
        made: device, dtype.
    """
    if groups is None:
        groups = max(k for k in range(1, 9) if channels % k == 0 and (channels // k >= 4 or k == 1))
    return nn.GroupNorm(math.gcd(groups, channels), channels, **made)


def _placed(made: dict[str, Any]) -> dict[str, Any]:
    """For `skip_init`, which takes a device of None for one that holds no values."""
    return {**made, "device": torch.get_default_device() if made.get("device") is None else made["device"]}
