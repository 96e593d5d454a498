"""Residual cells of images: one resolution, or several at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from wellposed._checks import check_interval, check_positive_integer
from wellposed.errors import InvalidArgument
from wellposed.nn.vision.modules import checked_channels, conv, norm

#: What a cell is given besides its state: features, or features and the masks of
#: `VariationalDropout`.
CellInput = Any


class ResidualCell(nn.Module):
    r"""f(z, x) = norm(relu(z + norm(x + W2 * norm(relu(W1 * z))))), with group norms [nguyen2022,
    Section 2.2].

    Nothing bounds its Jacobian: an equilibrium may not exist, and need not be unique. With small
    weights (the default) it is usually found quickly; `jacobian_penalty` keeps it so in training,
    `equilibrium_spectral_radius` measures.

    Args:
        channels: Of z and x.
        inner: Channels between W1 and W2; as many as `channels` if not given.
        groups: Of the norms; None takes as many as leave four channels or more in each, at most
            eight. With one channel in a group the mean of that channel over the image is fixed, and
            a head that averages over the image is blind.
        kernel_size: Of W1 and W2, odd.
        init_std: Standard deviation of their entries.
        input_gain: Initial weight of the norm around x: the greater, the more x outweighs z. With
            small weights the map contracts better then.
        weight_norm: Whether W1 and W2 are weight-normalized [salimans2016].
        generator: Draws them.
        device, dtype: Of the parameters.

    Examples:
        >>> import torch, wellposed as wp
        >>> x = torch.randn(2, 8, 6, 6, generator=torch.Generator().manual_seed(0))
        >>> layer = wp.EquilibriumLayer(wp.nn.ResidualCell(8), rtol=1e-4)
        >>> layer(x).shape, layer.last_solution.status
        (torch.Size([2, 8, 6, 6]), StatusArray(CONVERGED: 2))
    """

    def __init__(
        self,
        channels: int,
        inner: int | None = None,
        *,
        groups: int | None = None,
        kernel_size: int = 3,
        init_std: float = 0.01,
        input_gain: float = 1.0,
        weight_norm: bool = False,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        inner = channels if inner is None else inner
        for name, value in (("channels", channels), ("inner", inner), ("groups", groups or 1), ("kernel_size", kernel_size)):
            check_positive_integer("ResidualCell", name, value)
        if kernel_size % 2 == 0:
            raise InvalidArgument(f"The 'kernel_size' parameter of ResidualCell must be odd. Got {kernel_size} instead.")
        for name, size in (("init_std", init_std), ("input_gain", input_gain)):
            check_interval("ResidualCell", name, size, low=0.0, closed="neither")
        factory_kwargs: dict[str, Any] = {"device": device, "dtype": dtype}
        drawn: dict[str, Any] = {"std": init_std, "generator": generator, "weight_norm": weight_norm}
        self.conv1 = conv(channels, inner, kernel_size, **drawn, **factory_kwargs)
        self.conv2 = conv(inner, channels, kernel_size, **drawn, **factory_kwargs)
        self.norm1 = norm(inner, groups, **factory_kwargs)
        self.norm2, self.norm3 = norm(channels, groups, **factory_kwargs), norm(channels, groups, **factory_kwargs)
        nn.init.constant_(self.norm2.weight, input_gain)
        self.inner = inner

    def forward(self, z: Tensor, x: CellInput) -> Tensor:
        """(batch, channels, h, w) -> the same.

        Args:
            z: The state.
            x: Features of the shape of z; or a tuple of features and a mask on norm(relu(W1 * z)).
        """
        x, mask = x if isinstance(x, tuple) else (x, None)
        return self.block(z, x, mask)

    def block(self, z: Tensor, x: Tensor, mask: Tensor | None) -> Tensor:
        """f(z, x), with a mask or without."""
        h = self.norm1(torch.relu(self.conv1(z)))
        h = self.conv2(h if mask is None else h * mask)
        z_next: Tensor = self.norm3(torch.relu(z + self.norm2(x + h)))
        return z_next

    def initial(self, x: CellInput) -> Tensor:
        """The start of a solve: zeros."""
        return torch.zeros_like(x[0] if isinstance(x, tuple) else x)

    def mask_like(self, x: Tensor) -> Tensor:
        """A tensor of the shape of a mask, for features x."""
        return x.new_zeros(()).expand(x.shape[0], self.inner, *x.shape[2:])


class MultiscaleCell(nn.Module):
    r"""A residual block at every resolution, then a sum over resolutions [bai2020].

        y_i = ResidualCell_i(z_i, x_i),   z_i' = norm(relu(sum_j T_ij y_j))

    T_ii is the identity; T_ij for j finer than i is i - j strided 3 x 3 convolutions; for j coarser
    a 1 x 1 convolution and nearest-neighbour upsampling. The state is a tuple, finest first; each
    resolution halves (rounding up) the one before.

    A departure: [bai2020] injects x at the finest resolution only. In a block without x the inner
    norm brings W2 * (...) back to unit size however small W2 is, and small weights do not make the
    map contract; so every resolution has its x_i here.

    Args:
        channels: Of each resolution, finest first.
        groups, init_std, weight_norm, generator, device, dtype: As in `ResidualCell`.

    Examples:
        >>> import torch, wellposed as wp
        >>> x = torch.randn(2, 8, 8, 8), torch.randn(2, 16, 4, 4)
        >>> layer = wp.EquilibriumLayer(wp.nn.MultiscaleCell((8, 16)), rtol=1e-3)
        >>> [tuple(z.shape) for z in layer(x, z0=tuple(map(torch.zeros_like, x)))]
        [(2, 8, 8, 8), (2, 16, 4, 4)]
    """

    def __init__(
        self,
        channels: Sequence[int],
        *,
        groups: int | None = None,
        init_std: float = 0.01,
        weight_norm: bool = False,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.channels = checked_channels("MultiscaleCell", channels)
        factory_kwargs: dict[str, Any] = {"device": device, "dtype": dtype}
        drawn: dict[str, Any] = {"generator": generator, "weight_norm": weight_norm, "init_std": init_std}
        self.blocks = nn.ModuleList(ResidualCell(c, groups=groups, **drawn, **factory_kwargs) for c in self.channels)
        self.mixers = nn.ModuleList(
            nn.ModuleList(self._mixer(j, i, **drawn, **factory_kwargs) for j in range(len(self.channels)))
            for i in range(len(self.channels))
        )
        self.norms = nn.ModuleList(norm(c, groups, **factory_kwargs) for c in self.channels)

    def _mixer(self, source: int, target: int, *, init_std: float, **options: Any) -> nn.Module:
        """T for one pair of resolutions, up to the final resizing."""
        a, b = self.channels[source], self.channels[target]
        if source == target:
            return nn.Identity()
        if source > target:
            return conv(a, b, 1, std=init_std, **options)
        steps = target - source
        widths = [a] * steps + [b]
        return nn.Sequential(*(conv(widths[k], widths[k + 1], 3, std=init_std, stride=2, **options) for k in range(steps)))

    def forward(self, z: tuple[Tensor, ...], x: CellInput) -> tuple[Tensor, ...]:
        """A tuple of (batch, channels_i, h_i, w_i) -> the same.

        Args:
            z: The state.
            x: A tuple of features, of the shapes of z; or a tuple of that tuple and one of masks.
        """
        features, masks = x if isinstance(x[0], tuple) else (x, (None,) * len(z))
        y = [
            block.block(part, feature, mask)  # type: ignore[operator]
            for block, part, feature, mask in zip(self.blocks, z, features, masks, strict=True)
        ]
        mixed = []
        for i, (mixers, normalize) in enumerate(zip(self.mixers, self.norms, strict=True)):
            total = y[i]
            for j, mixer in enumerate(mixers):  # type: ignore[arg-type, var-annotated]
                if j != i:
                    part = mixer(y[j])
                    total = total + (nn.functional.interpolate(part, size=y[i].shape[2:]) if j > i else part)
            mixed.append(normalize(torch.relu(total)))
        return tuple(mixed)

    def initial(self, x: CellInput) -> tuple[Tensor, ...]:
        """The start of a solve: zeros."""
        features = x[0] if isinstance(x[0], tuple) else x
        return tuple(torch.zeros_like(feature) for feature in features)

    def mask_like(self, x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Tensors of the shapes of masks, for features."""
        return x
