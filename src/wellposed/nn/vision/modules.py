"""Parts of image networks: convolutions, norms, dropout with one mask a solve, encoders, heads."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, skip_init

from wellposed._checks import check_interval, check_positive_integer
from wellposed.errors import InvalidArgument, InvalidType


def checked_channels(owner: str, channels: Any) -> tuple[int, ...]:
    """The channels of each resolution, checked: positive integers, at least one."""
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
    **factory_kwargs: Any,
) -> nn.Module:
    """A convolution without bias that keeps the size (up to the stride), with normal weights.

    Args:
        in_channels, out_channels, kernel_size, stride: As in torch.
        std: Of the weights; None takes 1/sqrt(fan-in), which keeps the size of the values.
        generator: Draws them.
        weight_norm: Whether the weight is g v/|v|, filter by filter [salimans2016]. It is a
            function of parameters only, so that it is the same at every evaluation of a solve.
        factory_kwargs: device, dtype.
    """
    shape = (in_channels, out_channels, kernel_size)
    module = skip_init(nn.Conv2d, *shape, stride=stride, padding=kernel_size // 2, bias=False, **_placed(factory_kwargs))
    std = 1 / math.sqrt(in_channels * kernel_size**2) if std is None else std
    with torch.no_grad():
        module.weight.normal_(0.0, std, generator=generator)
    return parametrizations.weight_norm(module) if weight_norm else module


def linear(in_features: int, out_features: int, *, generator: torch.Generator | None, **factory_kwargs: Any) -> nn.Linear:
    """A linear read-out with weights of variance 1/fan-in and zero bias."""
    module: nn.Linear = skip_init(nn.Linear, in_features, out_features, **_placed(factory_kwargs))
    with torch.no_grad():
        module.weight.normal_(0.0, 1 / math.sqrt(in_features), generator=generator)
        module.bias.zero_()
    return module


def norm(channels: int, groups: int | None, **factory_kwargs: Any) -> nn.GroupNorm:
    """Group normalization over the pixels and channels of a group of one sample.

    Args:
        channels: How many.
        groups: How many (their greatest common divisor with the channels is used); None takes as
            many as leave four channels or more in each, at most eight. A group of one channel would
            fix the mean of that channel over the image, and with it all that a head sees that
            averages over images.
        factory_kwargs: device, dtype.
    """
    if groups is None:
        groups = max(k for k in range(1, 9) if channels % k == 0 and (channels // k >= 4 or k == 1))
    return nn.GroupNorm(math.gcd(groups, channels), channels, **factory_kwargs)


def _placed(factory_kwargs: dict[str, Any]) -> dict[str, Any]:
    """For `skip_init`, which takes a device of None for one that holds no values."""
    return {
        **factory_kwargs,
        "device": torch.get_default_device() if factory_kwargs.get("device") is None else factory_kwargs["device"],
    }


class VariationalDropout(nn.Module):
    r"""Masks of 0 and 1/(1 - p), drawn once for all evaluations of a solve [gal2016].

    Ordinary dropout inside a cell draws anew at every evaluation, and a map that changes has no
    fixed point. Here the mask is part of the *input* of the cell, one for each sample, so that it
    also stays with its sample when others have finished, and is the same in the backward pass. In
    evaluation mode there is none.

    Args:
        p: Probability of a zero, in [0, 1).
        generator: Draws the masks; torch's global one if not given. A copy of the module draws from
            the same one.
    """

    def __init__(self, p: float, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        check_interval("VariationalDropout", "p", p, low=0.0, high=1.0, closed="left")
        self.p = p
        self._generator = (generator,)

    def forward(self, like: Tensor) -> Tensor | None:
        """A mask of the shape (batch, ...) of `like`; None where there is nothing to drop."""
        if not self.training or self.p == 0.0:
            return None
        generator = self._generator[0]
        device = like.device if generator is None else generator.device
        keep = torch.rand(like.shape, generator=generator, device=device, dtype=like.dtype) >= self.p
        return keep.to(like) / (1.0 - self.p)

    def __deepcopy__(self, memo: dict[int, object]) -> VariationalDropout:
        other = VariationalDropout(self.p, generator=self._generator[0])
        other.training = self.training
        return other

    def extra_repr(self) -> str:
        return f"p={self.p:g}"


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
        factory_kwargs: dict[str, Any] = {"device": device, "dtype": dtype}
        self.in_channels = in_channels
        self.conv = conv(in_channels, channels, 3, std=None, stride=stride, generator=generator, **factory_kwargs)
        self.norm = norm(channels, groups, **factory_kwargs)

    def forward(self, X: Tensor) -> Tensor:
        """(batch, in_channels, H, W) -> (batch, channels, h, w)."""
        x: Tensor = self.norm(self.conv(X))
        return x


class PyramidEncoder(nn.Module):
    """x_1 = norm(V_1 * X), x_(i+1) = norm(V_(i+1) * relu(x_i)) with stride 2, finest first.

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
        features: list[Tensor] = []
        for stage in self.stages:
            features.append(stage(torch.relu(features[-1]) if features else X))
        return tuple(features)


class ClassificationHead(nn.Module):
    """Averages over a grid of regions, then one linear map: (batch, classes) logits.

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
        """A tensor, or a tuple of resolutions, -> (batch, classes); `size` is not used."""
        parts = z if isinstance(z, tuple) else (z,)
        logits: Tensor = self.linear(torch.cat([self.pool(part).flatten(1) for part in parts], dim=1))
        return logits


class SegmentationHead(nn.Module):
    """Resizes to the finest, a 1 x 1 convolution, then to the image: (batch, classes, H, W).

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
        """A tensor, or a tuple of resolutions, -> (batch, classes, H, W) for that size."""
        parts = z if isinstance(z, tuple) else (z,)
        finest = parts[0].shape[2:]
        joined = torch.cat([nn.functional.interpolate(part, size=finest) for part in parts], dim=1)
        return nn.functional.interpolate(self.conv(joined), size=size, mode="bilinear", align_corners=False)


class WeightTied(nn.Module):
    r"""z_0 = 0, z_(k+1) = cell(z_k, x), k < repeats: a finite depth [nguyen2022, Fig. 4.4].

    Differentiated through every step, so memory grows with `repeats`.

    Args:
        cell: `cell(z, x)`; its method `initial(x)`, if it has one, gives z_0.
        repeats: 6, 11 and 18 in the thesis.
    """

    def __init__(self, cell: Callable[..., Any], repeats: int) -> None:
        super().__init__()
        if not callable(cell):
            raise InvalidType(f"cell must be callable; got {type(cell).__name__}.")
        check_positive_integer("WeightTied", "repeats", repeats)
        self.cell, self.repeats = cell, repeats

    def forward(self, x: Any, z0: Any = None) -> Any:
        """z after `repeats` steps from z0, or from zeros."""
        initial = getattr(self.cell, "initial", torch.zeros_like)
        z = initial(x) if z0 is None else z0
        for _ in range(self.repeats):
            z = self.cell(z, x)
        return z

    def extra_repr(self) -> str:
        return f"repeats={self.repeats}"
