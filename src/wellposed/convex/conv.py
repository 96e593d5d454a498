"""ConvOptEq: the convolutional network of the paper's experiments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.grad import conv2d_weight

from wellposed._checks import check_positive_integer
from wellposed.convex._network import AbstractOptEq, check_norm_bound
from wellposed.convex.stages import AbstractLinearMap, UnitLayer
from wellposed.errors import InvalidArgument
from wellposed.nn import ConvNormBall
from wellposed.nn.parametrizations import conv_norm_upper

#: The channels of the five layers of [xie2021, Section 5.1]; Section 5.2 has (16, 32, 64, 64, 128).
PAPER_CHANNELS = (16, 32, 64, 128, 128)


class ConvOptEq(AbstractOptEq):
    r"""A deep OptEq of images: z = f_L o ... o f_1(z, g(X)), f_l(z, x) = a/mu W_l^T s(W_l z + U_l x
    + b_l) + (1 - a) z.

    W_l and U_l are convolutions with zeros around the image, W_l^T is the transpose of W_l, g is a
    feature extractor, and a pooling head makes predictions of z [xie2021, Section 5]. |W_l|^2 L_s
    <= norm_bound^2 mu is kept with a bound that is proved for this padding, see
    `conv_norm_upper`.

    The paper gives neither the channels of z nor those of g(X); 32 and 26 give about its number of
    parameters (199k and 162k for its two choices of `channels`). Initialization: |W_l| = 0.7
    sqrt(mu/L_s) by that bound, U_l by the variance 2/(fan in), b = 0.

        >>> import torch, wellposed as wp
        >>> model = wp.convex.ConvOptEq(3, (4, 8), state_channels=4, feature_channels=4)
        >>> model(torch.randn(2, 3, 8, 8)).shape
        torch.Size([2, 10])

    Args:
        in_channels: Of the images.
        channels: (c_1, ..., c_L) of W_l z.
        state_channels: Of z.
        feature_channels: Of g(X).
        kernel_size: Of W_l and U_l, odd.
        out_features: Of the default head.
        extractor: g, a module from images to (n, feature_channels, height, width); one 3x3
            convolution and ReLU if not given.
        head: A module from (n, state_channels, height, width) to predictions; average pooling to 4
            x 4 and a linear layer if not given.
        norm_bound: In (0, 1]; None does not constrain the kernels.
        generator: Of the unit layers. Extractor and head are torch modules and use its global
            generator.
        device, dtype: Of the parameters made here.
        options: `alpha`, `mu`, `activation`, `prior`, `solver`, `gradient`, `on_failure`, `rtol`,
            `max_steps` as in `AbstractOptEq`.

    Attributes:
        W: L kernels (c_l, state_channels, k, k). U: L kernels (c_l, feature_channels, k, k). b: L
            vectors (c_l,).
        extractor, head: The modules.
    """

    def __init__(
        self,
        in_channels: int,
        channels: Sequence[int] = PAPER_CHANNELS,
        *,
        state_channels: int = 32,
        feature_channels: int = 26,
        kernel_size: int = 3,
        out_features: int = 10,
        extractor: nn.Module | None = None,
        head: nn.Module | None = None,
        norm_bound: float | None = 0.95,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if not isinstance(channels, (list, tuple)) or not channels:
            raise InvalidArgument(
                f"The 'channels' parameter of ConvOptEq must be a sequence such as (16, 32). Got {channels!r}."
            )
        sizes = {"in_channels": in_channels, "state_channels": state_channels, "feature_channels": feature_channels}
        for name, size in [*sizes.items(), *(("channels", size) for size in channels)]:
            check_positive_integer("ConvOptEq", name, size)
        if kernel_size % 2 == 0:
            raise InvalidArgument(f"The 'kernel_size' parameter of ConvOptEq must be odd. Got {kernel_size!r} instead.")
        check_norm_bound("ConvOptEq", norm_bound)
        self.in_channels, self.channels, self.norm_bound = in_channels, tuple(channels), norm_bound
        self.state_channels, self.feature_channels = state_channels, feature_channels
        self.weight = None if norm_bound is None else ConvNormBall(self.norm_limit(norm_bound))
        draw: dict[str, Any] = {"generator": generator, "device": device, "dtype": dtype}
        k = kernel_size
        W = [torch.randn(size, state_channels, k, k, **draw) for size in channels]
        spread = math.sqrt(2 / (feature_channels * k * k))
        U = [torch.randn(size, feature_channels, k, k, **draw) * spread for size in channels]
        self.W = nn.ParameterList(K * (self.norm_limit(0.7) / float(conv_norm_upper(K))) for K in W)
        self.U = nn.ParameterList(U)
        self.b = nn.ParameterList(torch.zeros(size, device=device, dtype=dtype) for size in channels)
        factory_kwargs: dict[str, Any] = {"device": device, "dtype": dtype}
        if extractor is None:
            extractor = nn.Sequential(nn.Conv2d(in_channels, feature_channels, 3, padding=1, **factory_kwargs), nn.ReLU())
        if head is None:
            linear = nn.Linear(16 * state_channels, out_features, **factory_kwargs)
            head = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), linear)
        self.extractor, self.head = extractor, head

    def kernels(self) -> list[Tensor]:
        """W_1, ..., W_L (c_l, state_channels, k, k) as they act: the parameters, made small
        enough."""
        return [K if self.weight is None else self.weight(K) for K in self.W]

    def features(self, X: Tensor) -> Tensor:
        """(n, in_channels, height, width) -> (n, feature_channels, ...): g(X)."""
        if not isinstance(X, Tensor) or X.dim() != 4 or X.shape[1] != self.in_channels:
            seen = tuple(X.shape) if isinstance(X, Tensor) else type(X).__name__
            raise InvalidArgument(f"ConvOptEq expects images (n, {self.in_channels}, height, width); got {seen}.")
        features: Tensor = self.extractor(X)
        # under autocast the extractor answers in low precision; the equilibrium is found in that of the parameters
        return features.to(self.U[0].dtype)

    def units(self, features: Tensor) -> list[UnitLayer]:
        options = {"scale": self.alpha / self.mu, "keep": 1 - self.alpha}
        padding = self.U[0].shape[-1] // 2
        seen = [functional.conv2d(features, channels_last(U), b, padding=padding) for U, b in zip(self.U, self.b, strict=True)]
        return [UnitLayer(ConvolutionMap(K), c, self.activation, **options) for K, c in zip(self.kernels(), seen, strict=True)]

    def sample_shape(self, features: Tensor) -> tuple[int, ...]:
        if features.dim() != 4 or features.shape[1] != self.feature_channels:
            raise InvalidArgument(
                f"ConvOptEq expects features (n, {self.feature_channels}, height, width); got {tuple(features.shape)}."
            )
        return (self.state_channels, *features.shape[2:])

    def norms_upper(self) -> list[float]:
        with torch.no_grad():
            return [float(conv_norm_upper(K)) for K in self.kernels()]

    def readout(self, Z: Tensor) -> Tensor:
        """(n, state_channels, height, width) -> predictions."""
        prediction: Tensor = self.head(Z)
        return prediction

    def extra_repr(self) -> str:
        return f"{self.in_channels}, {self.channels}, state_channels={self.state_channels}, {self._common_repr()}"


class ConvolutionMap(AbstractLinearMap):
    """A convolution with a kernel K (h, c, k, k), k odd, stride 1 and zeros around the image, so
    that sizes are kept."""

    def __init__(self, K: Tensor) -> None:
        self.tensor = channels_last(K)
        self._padding = K.shape[-1] // 2

    def apply(self, z: Tensor) -> Tensor:
        return functional.conv2d(z, self.tensor, padding=self._padding)

    def transpose(self, v: Tensor) -> Tensor:
        return functional.conv_transpose2d(v, self.tensor, padding=self._padding)

    def cotangent(self, left: Tensor, right: Tensor) -> Tensor:
        weight: Tensor = conv2d_weight(right, self.tensor.shape, left, padding=self._padding)
        return weight

    def with_tensor(self, tensor: Tensor) -> ConvolutionMap:
        return ConvolutionMap(tensor)


def channels_last(K: Tensor) -> Tensor:
    """The same kernel, channels innermost in memory: convolutions with it answer in that layout
    too, in half the time.

    Only in single precision; double precision has no kernels for it on a CPU, and every product
    would be copied.
    """
    return K.contiguous(memory_format=torch.channels_last) if K.dtype == torch.float32 else K
