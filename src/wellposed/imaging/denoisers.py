"""Small convolutional denoisers, free or with a bounded Lipschitz constant."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor, nn

from wellposed._checks import check_interval, check_positive_integer
from wellposed.errors import InvalidArgument
from wellposed.nn.parametrizations import conv_norm_upper

#: Frequencies for the norm of one layer of filters, which may be many: it has few channels.
_GRID = 32


def _inside(K: Tensor, grid: int = 12) -> Tensor:
    """K / max(1, |K|); NaN where K holds numbers that are not finite."""
    if not bool(torch.isfinite(K).all()):
        return K * math.nan
    return K / conv_norm_upper(K, grid=grid).clamp(min=1).to(K.dtype)


def _constant(bound: float, kernels: list[Tensor], grid: int = 12) -> float:
    """`bound`, as the dtype rounds it, times the constants of steps with these kernels; infinite if
    one is not finite.

    With |K|^2 = 1 + e after rounding a step has the constant 1 + 2 e.
    """
    if not all(bool(torch.isfinite(K).all()) for K in kernels):
        return math.inf
    squares = [float(conv_norm_upper(K, grid=grid)) ** 2 for K in kernels]
    return bound * (1 + torch.finfo(kernels[0].dtype).eps) * math.prod(max(1.0, 2 * square - 1) for square in squares)


def _blocks(x: Tensor, scale: int) -> Tensor:
    """(batch, channels * scale^2, height/scale, width/scale); the last pixels are repeated where
    the sizes do not divide."""
    rows, columns = (-size % scale for size in x.shape[-2:])
    if rows or columns:
        x = nn.functional.pad(x, (0, columns, 0, rows), mode="replicate")
    if x.shape[0] == 0:  # torch would leave it as it is
        return x.reshape(0, x.shape[1] * scale**2, x.shape[2] // scale, x.shape[3] // scale)
    return nn.functional.pixel_unshuffle(x, scale)


def _pixels(h: Tensor, scale: int, like: Tensor) -> Tensor:
    """The inverse of `_blocks`, of the height and width of an image."""
    if h.shape[0] == 0:
        return h.reshape(0, h.shape[1] // scale**2, *like.shape[-2:])
    return nn.functional.pixel_shuffle(h, scale)[..., : like.shape[-2], : like.shape[-1]]


class DnCNN(nn.Module):
    """x - net(x), where net is convolutions 3 x 3 with ReLUs between them [zhang2017].

    Nothing bounds its Lipschitz constant. The last convolution starts at a tenth of its size, so
    that the network starts near the identity.

    Args:
        channels: Of the images.
        features: Channels inside.
        depth: Convolutions, at least 2.
        scale: The net sees blocks of scale x scale pixels as channels [zhang2018]: it reaches
            farther and costs less.
        generator: Of the initialization.

    Examples:
        >>> import torch, wellposed as wp
        >>> denoiser = wp.imaging.DnCNN(channels=1, features=8, depth=3)
        >>> denoiser(torch.rand(2, 1, 8, 8)).shape
        torch.Size([2, 1, 8, 8])
    """

    lipschitz = math.inf

    def __init__(
        self,
        channels: int = 1,
        features: int = 32,
        depth: int = 4,
        *,
        scale: int = 1,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("channels", channels), ("features", features), ("depth", depth), ("scale", scale)):
            check_positive_integer("DnCNN", name, value)
        self.channels, self.scale = channels, scale
        widths = [channels * scale**2, *[features] * (max(depth, 2) - 1), channels * scale**2]
        self.kernels = nn.ParameterList(
            torch.randn(b, a, 3, 3, generator=generator) * math.sqrt(2 / (9 * a))
            for a, b in zip(widths, widths[1:], strict=False)
        )
        self.biases = nn.ParameterList(torch.zeros(b) for b in widths[1:])
        with torch.no_grad():
            self.kernels[-1] *= 0.1

    def weights(self) -> list[tuple[Tensor, Tensor]]:
        """Kernels and biases of the convolutions."""
        return list(zip(self.kernels, self.biases, strict=True))

    def apply_weights(self, x: Tensor, weights: list[tuple[Tensor, Tensor]]) -> Tensor:
        """The network with given weights."""
        h = _blocks(x, self.scale)
        for i, (kernel, bias) in enumerate(weights):
            h = nn.functional.conv2d(torch.relu(h) if i else h, kernel, bias, padding=1)
        return x - _pixels(h, self.scale, x)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, height, width) -> the same."""
        return self.apply_weights(x, self.weights())


class BoundedDnCNN(nn.Module):
    r"""A residual network of convolutions whose Lipschitz constant is at most `bound`.

        h_0 = (x, 0, ..., 0),    h_{l+1} = h_l - 2 W_l^T relu(W_l h_l + b_l),    |W_l| <= 1,

    and the output is `bound` times the first channels of the last h. Every step subtracts twice the
    gradient of a convex function with a 1-Lipschitz gradient, and is 1-Lipschitz [meunier2022]. The
    kernels of W_l are divided by `conv_norm_upper` where it exceeds 1.

    Args:
        channels: Of the images.
        features: Channels of h and rows of every W_l, at least `channels`.
        depth: Steps.
        bound: In (0, 1).
        kernel_size: Of the W_l, odd.
        generator: Of the initialization.

    Examples:
        >>> import torch, wellposed as wp
        >>> denoiser = wp.imaging.BoundedDnCNN(channels=1, features=8, depth=2, bound=0.9)
        >>> x1, x2 = torch.rand(1, 1, 8, 8), torch.rand(1, 1, 8, 8)
        >>> bool((denoiser(x1) - denoiser(x2)).norm() <= 0.9 * (x1 - x2).norm())
        True
    """

    def __init__(
        self,
        channels: int = 1,
        features: int = 32,
        depth: int = 4,
        *,
        bound: float = 0.99,
        kernel_size: int = 3,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("channels", channels), ("features", features), ("depth", depth)):
            check_positive_integer("BoundedDnCNN", name, value)
        if features < channels:
            raise InvalidArgument(f"BoundedDnCNN needs at least as many features as channels; got {features} and {channels}.")
        check_interval("BoundedDnCNN", "bound", bound, low=0.0, high=1.0, closed="neither")
        self.channels, self.features, self.bound = channels, features, bound
        shape = (features, features, kernel_size, kernel_size)
        self.kernels = nn.ParameterList(
            torch.randn(*shape, generator=generator) / (kernel_size * math.sqrt(features)) for _ in range(depth)
        )
        self.biases = nn.ParameterList(torch.zeros(features) for _ in range(depth))

    @property
    def lipschitz(self) -> float:
        """An upper bound of the Lipschitz constant, for the kernels as their dtype stores them;
        infinite if they are not finite."""
        with torch.no_grad():
            return _constant(self.bound, [K for K, _ in self.weights()])

    def weights(self) -> list[tuple[Tensor, Tensor]]:
        """The kernels inside the unit ball, and the biases; made once for many evaluations."""
        return [(_inside(K), b) for K, b in zip(self.kernels, self.biases, strict=True)]

    def apply_weights(self, x: Tensor, weights: list[tuple[Tensor, Tensor]]) -> Tensor:
        """The network with given weights."""
        h = nn.functional.pad(x, (0, 0, 0, 0, 0, self.features - self.channels))
        for K, b in weights:
            padding = K.shape[-1] // 2
            s = torch.relu(nn.functional.conv2d(h, K, b, padding=padding))
            h = h - 2 * nn.functional.conv_transpose2d(s, K, padding=padding)
        return self.bound * h[:, : self.channels]

    def forward(self, x: Tensor) -> Tensor:
        """(batch, channels, height, width) -> the same."""
        return self.apply_weights(x, self.weights())

    def extra_repr(self) -> str:
        return f"{self.channels}, {self.features}, {len(self.kernels)}, bound={self.bound:g}"


class AdaptiveDenoiser(nn.Module):
    r"""A denoiser that adapts to the data, with a Lipschitz constant in x of at most `bound` = k.

        N(x) = k S(x) + (1 - k) p,    S(x) = x - 2 K^T (c * clip(K x, -t, t)),    |K| <= 1

    The weights 0 <= c <= 1 of every filter at every pixel and the image p are computed by a free
    convolutional network, of a first estimate: (A^T A + e)^-1 (1 + e) A^T y, where e is learned, or
    A^T y if the operator has no `prox_l2`. A blur keeps the mean of an image, and so does the
    estimate; without the factor 1 + e it would not. Whatever they are, S is 1-Lipschitz in x.
    Kernels of K have mean 0.

    Args:
        channels: Of the images.
        features: Filters of K.
        kernel_size: Of K, odd.
        hidden, depth: Channels and convolutions of the free network; depth is at least 2.
        scale: The free network sees blocks of scale x scale pixels, as in `DnCNN`.
        bound: k, in (0, 1).
        generator: Of the initialization.

    Examples:
        >>> import torch, wellposed as wp
        >>> blur = wp.imaging.Blur(wp.imaging.gaussian_kernel(1.0))
        >>> cell = wp.imaging.DEQGrad(blur, wp.imaging.AdaptiveDenoiser(features=4, hidden=4, depth=2))
        >>> wp.imaging.Reconstructor(cell, rtol=1e-3)(torch.rand(2, 1, 8, 8)).shape
        torch.Size([2, 1, 8, 8])
    """

    def __init__(
        self,
        channels: int = 1,
        features: int = 16,
        *,
        kernel_size: int = 5,
        hidden: int = 32,
        depth: int = 5,
        scale: int = 1,
        bound: float = 0.9,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        sizes = {"channels": channels, "features": features, "hidden": hidden, "depth": depth, "scale": scale}
        for name, value in sizes.items():
            check_positive_integer("AdaptiveDenoiser", name, value)
        check_interval("AdaptiveDenoiser", "bound", bound, low=0.0, high=1.0, closed="neither")
        self.channels, self.features, self.bound, self.scale = channels, features, bound, scale
        self.kernel = nn.Parameter(torch.randn(features, channels, kernel_size, kernel_size, generator=generator) / kernel_size)
        self.log_threshold = nn.Parameter(torch.linspace(math.log(0.002), math.log(0.05), features))
        self.log_e = nn.Parameter(torch.tensor(math.log(0.4)))
        widths = [channels * scale**2, *[hidden] * (max(depth, 2) - 1), (features + channels) * scale**2]
        self.kernels = nn.ParameterList(
            nn.init.orthogonal_(
                torch.empty(b, a, 3, 3), math.sqrt(2), generator=generator
            )  # learns faster than independent entries
            for a, b in itertools.pairwise(widths)
        )
        self.biases = nn.ParameterList(torch.zeros(b) for b in widths[1:])
        with torch.no_grad():
            self.kernels[-1] *= 0.1

    @property
    def lipschitz(self) -> float:
        """An upper bound of the Lipschitz constant in x, for the kernel as its dtype stores it;
        infinite if it or the e of the first estimate is not finite."""
        with torch.no_grad():
            if not bool(torch.isfinite(self.log_e.neg().exp())):
                return math.inf
            return _constant(self.bound, [self.weights()[0]], _GRID)

    def condition(self, operator: Any, y: Tensor) -> tuple[Tensor, Tensor]:
        """(batch, features, height, width) c and (batch, channels, height, width) p, of the
        data."""
        first: Tensor = operator.A_adjoint(y)
        if hasattr(operator, "prox_l2"):
            first = operator.prox_l2(first, y, torch.exp(-self.log_e))
        h = _blocks(4 * (first - first.mean(dim=(2, 3), keepdim=True)), self.scale)
        for i, (kernel, bias) in enumerate(zip(self.kernels, self.biases, strict=True)):
            reach = 1 if self.scale > 1 or i in (0, len(self.kernels) - 1) else 2
            h = nn.functional.conv2d(torch.relu(h) if i else h, kernel, bias, padding=reach, dilation=reach)
        h = _pixels(h, self.scale, first)
        return torch.sigmoid(h[:, : self.features]), first + h[:, self.features :] / 4

    def weights(self) -> tuple[Tensor, Tensor]:
        """The kernel inside the unit ball, and the thresholds; made once for many evaluations."""
        K = self.kernel - self.kernel.mean(dim=(2, 3), keepdim=True)
        return _inside(K, _GRID), self.log_threshold.exp().reshape(-1, 1, 1)

    def apply_weights(self, x: Tensor, weights: tuple[Tensor, Tensor], c: Tensor, p: Tensor) -> Tensor:
        """The denoiser with given weights, for the maps of `condition`."""
        K, t = weights
        padding = K.shape[-1] // 2
        v = nn.functional.conv2d(x, K, padding=padding)
        smoothed = x - 2 * nn.functional.conv_transpose2d(c * torch.maximum(torch.minimum(v, t), -t), K, padding=padding)
        return self.bound * smoothed + (1 - self.bound) * p

    def forward(self, x: Tensor, operator: Any, y: Tensor) -> Tensor:
        """(batch, channels, height, width), for an image x and the data y of an operator."""
        return self.apply_weights(x, self.weights(), *self.condition(operator, y))

    def extra_repr(self) -> str:
        return f"{self.channels}, {self.features}, bound={self.bound:g}"
