"""Monotone cells on images: one convolution, or several resolutions."""

from __future__ import annotations

import abc
import math
from typing import Any

import torch
from torch import Tensor, nn

from wellposed._checks import check_positive_integer
from wellposed._tree import LOW_PRECISION
from wellposed.errors import InvalidArgument, InvalidType
from wellposed.nn._activation import check_activation
from wellposed.nn.activations import AbstractActivation, ReLU
from wellposed.nn.cell import AbstractCell
from wellposed.nn.maps.affine import OperatorMap
from wellposed.nn.maps.operator import OperatorCache
from wellposed.nn.monotone._lattice import largest_norm_upper, symbol
from wellposed.nn.monotone.weights import TierWeights


class _ImageCell(AbstractCell):
    """What the two cells share: injections U_i at every resolution, and W from `TierWeights`."""

    def __init__(
        self,
        in_channels: int,
        channels: Any,
        activation: AbstractActivation | None = None,
        *,
        kernel_size: int = 3,
        margin: float = 0.1,
        padding: str = "circular",
        bias: bool = True,
        scale: float = 0.5,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        check_positive_integer(name, "in_channels", in_channels)
        factory_kwargs: dict[str, Any] = {"device": device, "dtype": dtype}
        self.in_channels = in_channels
        self.activation = check_activation(name, ReLU() if activation is None else activation)
        structure: dict[str, Any] = {"margin": margin, "padding": padding, "scale": scale}
        self.weights = TierWeights(self._tiers(channels), kernel_size, **structure, generator=generator, **factory_kwargs)
        spread = math.sqrt(2 / (in_channels * kernel_size**2))
        self.U = nn.ParameterList(
            nn.Parameter(spread * torch.randn(c, in_channels, kernel_size, kernel_size, generator=generator, **factory_kwargs))
            for c in self.weights.channels
        )
        self.b = (
            nn.ParameterList(nn.Parameter(torch.zeros(c, **factory_kwargs)) for c in self.weights.channels) if bias else None
        )
        self._cache = OperatorCache()

    @abc.abstractmethod
    def _tiers(self, channels: Any) -> tuple[int, ...]:
        """The channels of every tier; raises for an argument that does not fit."""

    def injection(self, x: Tensor) -> Tensor:
        """(batch, in, H, W) -> (batch, n): U_i x_i + b_i of all tiers, x averaged to each tier."""
        parts = []
        for i, U in enumerate(self.U):
            image = x if i == 0 else nn.functional.avg_pool2d(x, 2**i)
            b = None if self.b is None else self.b[i]
            parts.append(self._convolve(image, U.to(x.dtype), None if b is None else b.to(x.dtype)).flatten(1))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def injection_norm_upper(self, height: int, width: int) -> float:
        """An upper bound of |U|, from all tiers: averages of 2^i x 2^i pixels have norm 2^-i."""
        total = 0.0
        for i, U in enumerate(self.U):
            h, w = height // 2**i, width // 2**i
            if self.weights.padding == "zeros":  # a restriction of the one on a larger torus
                h, w = h + U.shape[-1], w + U.shape[-1]
            total += (largest_norm_upper(symbol(U.detach().double(), (h, w))) / 2**i) ** 2
        return math.sqrt(total) * (1 + 1e-12)

    def _convolve(self, x: Tensor, U: Tensor, b: Tensor | None) -> Tensor:
        k = U.shape[-1]
        pads = (k // 2, (k - 1) // 2, k // 2, (k - 1) // 2)
        if self.weights.padding == "zeros":
            return nn.functional.conv2d(nn.functional.pad(x, pads), U, b)
        if max(pads) <= min(x.shape[-2:]):
            return nn.functional.conv2d(nn.functional.pad(x, pads, mode="circular"), U, b)
        raise InvalidArgument(
            f"{type(self).__name__}: a kernel of size {k} wraps around images of {x.shape[-2]} x {x.shape[-1]} more than once "
            "at some tier. Use a smaller kernel, fewer tiers or padding='zeros'."
        )

    def bind(self, x: Tensor) -> OperatorMap:
        lift = x.dtype in LOW_PRECISION or self.U[0].dtype in LOW_PRECISION
        x = x.float() if lift else x
        operator = self.weights.operator(int(x.shape[2]), int(x.shape[3]), self._cache, lift=lift)  # tensors in torch.jit.trace
        return OperatorMap(operator, self.injection(x), self.activation)

    def features(self, x: Tensor) -> int:
        """The number of features of the state for an input x; raises if x does not fit."""
        name = type(self).__name__
        if not isinstance(x, Tensor) or x.dim() != 4 or x.shape[1] != self.in_channels:
            seen = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise InvalidArgument(f"{name} expects x of shape (batch, {self.in_channels}, height, width); got {seen}.")
        dtype = self.U[0].dtype
        if _solved_in(x.dtype) != _solved_in(dtype):
            raise InvalidType(f"{name} has {dtype} parameters and got x of {x.dtype}; convert one, e.g. x.to({dtype}).")
        return sum(lattice.features for lattice in self.weights.lattices(int(x.shape[2]), int(x.shape[3])))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return self.bind(x).tracked(z.flatten(1)).reshape(z.shape)

    def extra_repr(self) -> str:
        return f"{self.in_channels}, activation={self.activation!r}, bias={self.b is not None}"


class MonotoneConvCell(_ImageCell):
    r"""f(z, x) = s(W * z + U * x + b) with convolutions, I - W >= m [winston2020, Section 5].

    The state is (batch, channels, H, W), with the height and width of x: strides belong outside.

    Args:
        in_channels: Of x.
        channels: C, of the state.
        activation: s; `ReLU()` if not given.
        kernel_size: Of A, B and U; any.
        margin: m, positive.
        padding: "circular" (exact resolvents by Fourier transforms) or "zeros" (see `TierWeights`).
        bias: Whether there is a b, one number per channel.
        scale: Size of A and B at the start; see `TierWeights`.
        generator: Of the initialization.
        device, dtype: Of the parameters.

    Attributes:
        weights: The `TierWeights` with A[0] and B[0]. U: [(C, in, k, k)]. b: [(C,)] or None.

    Examples:
        >>> import torch, wellposed as wp
        >>> cell = wp.nn.MonotoneConvCell(1, 4, margin=0.5)
        >>> layer = wp.EquilibriumLayer(cell, wp.PeacemanRachford())
        >>> layer(torch.ones(2, 1, 8, 8)).shape
        torch.Size([2, 4, 8, 8])
    """

    def _tiers(self, channels: Any) -> tuple[int, ...]:
        check_positive_integer("MonotoneConvCell", "channels", channels)
        return (channels,)

    def state_shape(self, x: Tensor) -> tuple[int, ...]:
        self.features(x)
        return (x.shape[0], self.weights.channels[0], x.shape[2], x.shape[3])


class MonotoneTierCell(_ImageCell):
    r"""f(z, x) = s(W z + U x + b) on several resolutions, coupled from fine to coarse.

    W is block lower-triangular and I - W >= m; see `TierWeights`. x enters every tier, averaged to
    its resolution. The state is (batch, n), one tier after the other; `split` separates them.

    Args:
        in_channels: Of x.
        channels: Of the tiers, finest first, at least two.
        activation, kernel_size, margin, padding, bias, scale, generator, device, dtype: As in
            `MonotoneConvCell`.

    Attributes:
        weights: The `TierWeights`. U, b: As in `MonotoneConvCell`, one per tier.

    Examples:
        >>> import torch, wellposed as wp
        >>> cell = wp.nn.MonotoneTierCell(1, (4, 8), margin=0.5)
        >>> layer = wp.EquilibriumLayer(cell, wp.PeacemanRachford())
        >>> x = torch.ones(2, 1, 8, 8)
        >>> [tuple(tier.shape) for tier in cell.split(layer(x), 8, 8)]
        [(2, 4, 8, 8), (2, 8, 4, 4)]
    """

    def _tiers(self, channels: Any) -> tuple[int, ...]:
        if not isinstance(channels, (tuple, list)) or len(channels) < 2:
            raise InvalidArgument(
                f"The 'channels' parameter of MonotoneTierCell must be a tuple of at least two integers. Got {channels!r} "
                "instead; for one resolution use MonotoneConvCell."
            )
        return tuple(channels)

    def state_shape(self, x: Tensor) -> tuple[int, ...]:
        return (x.shape[0], self.features(x))

    def split(self, z: Tensor, height: int, width: int) -> list[Tensor]:
        """(batch, n) -> [(batch, C_i, H/2^i, W/2^i)], for the H and W of the finest tier."""
        lattices = self.weights.lattices(height, width)
        parts = z.split([lattice.features for lattice in lattices], dim=1)
        return [part.reshape(-1, t.channels, t.height, t.width) for part, t in zip(parts, lattices, strict=True)]


def _solved_in(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in LOW_PRECISION else dtype
