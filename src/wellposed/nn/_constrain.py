"""constrain: norms of the linear and convolutional parts of any module stay bounded."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from wellposed._torch import transforms_active
from wellposed._tree import LOW_PRECISION
from wellposed.errors import InvalidArgument, InvalidType
from wellposed.nn.maps.operator import OperatorCache
from wellposed.nn.parametrizations import NormBall, Spectral, conv_norm_upper

M = TypeVar("M", bound=nn.Module)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def constrain(module: M, weight: Spectral | NormBall) -> M:
    r"""Keeps the norm of every linear and convolutional part of a module at most `weight.bound`.

    Each `nn.Linear` and `nn.Conv...` in it gets its weight through a parametrization of
    `torch.nn.utils.parametrize`: V -> V min(1, bound/N(V)), where N(V) is the spectral norm of a
    matrix, or for a convolution an upper bound of the norm of the linear map of images of every
    size. So training can change a weight freely, and the norm stays bounded. A composition of
    parts is bounded by the product of their bounds: with 1-Lipschitz activations, and x only
    added, a chain that holds a `Spectral(0.9)` part contracts. Biases, normalizations, attention
    weights and embeddings stay as they are.

    Within a solve N(V) is computed once per value of V. `remove_parametrizations` of
    `torch.nn.utils.parametrize` takes the constraint away again.

        >>> import torch, wellposed as wp
        >>> cell = wp.nn.constrain(torch.nn.Linear(6, 6), wp.nn.Spectral(0.9))
        >>> layer = wp.EquilibriumLayer(lambda z, x: torch.tanh(cell(z) + x))
        >>> layer(torch.randn(8, 6)).shape
        torch.Size([8, 6])

    Args:
        module: Any module; it is changed in place.
        weight: `Spectral(bound)` with a bound below 1, or `NormBall(bound)` with any, which keeps
            it up to the rounding of the weights.

    Returns:
        The module.
    """
    if not isinstance(module, nn.Module):
        raise InvalidType(f"constrain needs a module; got {type(module).__name__}.")
    if not isinstance(weight, (Spectral, NormBall)):
        raise InvalidType(f"constrain bounds norms: give Spectral(bound) or NormBall(bound); got {weight!r}.")
    parts = [(name, part) for name, part in module.named_modules() if isinstance(part, (nn.Linear, *CONVOLUTIONS))]
    if not parts:
        raise InvalidArgument(
            f"constrain found no linear or convolutional part in {type(module).__name__}. Cells of wellposed have an argument "
            "weight= instead; a parameter of your own takes register_parametrization(module, name, Spectral(0.9))."
        )
    for name, part in parts:
        _check_part(name, part)
    for _, part in parts:
        ball = weight if isinstance(part, nn.Linear) else _ConvBall(weight.bound, part)
        parametrize.register_parametrization(
            part, "weight", _KnownValue(type(weight)(weight.bound) if ball is weight else ball)
        )
    return module


def _check_part(name: str, part: Any) -> None:
    if isinstance(part.weight, nn.UninitializedParameter):
        raise InvalidArgument(f"constrain: {name!r} has no weight yet; run the module once, then constrain it.")
    if not part.weight.is_floating_point():
        raise InvalidType(f"constrain: {name!r} has weights of {part.weight.dtype}; real floating point is needed.")
    mode = getattr(part, "padding_mode", "zeros")
    if mode not in ("zeros", "circular"):
        raise InvalidArgument(
            f"constrain: {name!r} has padding_mode={mode!r}, which can amplify its input beyond the norm of the kernel; use "
            "'zeros' or 'circular'."
        )
    if mode == "circular" and any(
        sum(sides) > dilation * (size - 1)
        for sides, dilation, size in zip(_paddings(part), part.dilation, part.kernel_size, strict=True)
    ):
        raise InvalidArgument(
            f"constrain: {name!r} pads by {part.padding}, more than its kernel of size {part.kernel_size} reaches; with "
            "padding_mode='circular' pixels are then repeated, beyond the norm of the kernel. Use padding='same'."
        )


def _paddings(part: Any) -> list[tuple[int, int]]:
    """What a convolution adds on both sides of every dimension."""
    flat = part._reversed_padding_repeated_twice[::-1]
    return [(flat[i], flat[i + 1]) for i in range(0, len(flat), 2)]


class _KnownValue(nn.Module):
    """A projection whose value without a graph is kept while V has the same value."""

    def __init__(self, projection: nn.Module) -> None:
        super().__init__()
        self.projection = projection
        self._cache = OperatorCache()

    def forward(self, V: Tensor) -> Tensor:
        if torch.is_grad_enabled() or transforms_active() or torch.compiler.is_compiling():
            value: Tensor = self.projection(V)
            return value
        known = self._cache.of((V,))
        if "value" not in known:
            known["value"] = self.projection(V)
        kept: Tensor = known["value"]
        return kept


class _ConvBall(nn.Module):
    r"""K -> K min(1, bound/N(K)), N(K) an upper bound of the norm of the convolution `part`.

    Groups act on separate channels, so the largest norm counts. A stride leaves out pixels, a
    dilation scales frequencies, and a transposed convolution is the adjoint: none enlarges
    the bound. Kernels are padded by zeros to an odd square; a third dimension is a sum of
    two-dimensional kernels, whose norms add up.
    """

    def __init__(self, bound: float, part: Any) -> None:
        super().__init__()
        self.bound, self.groups = bound, part.groups

    def norm(self, K: Tensor) -> Tensor:
        """(), float64."""
        while K.dim() < 5:
            K = K.unsqueeze(2)  # (out, in, depth, k1, k2)
        side = max(K.shape[3:]) // 2 * 2 + 1
        K = nn.functional.pad(K, (0, side - K.shape[4], 0, side - K.shape[3]))
        norms = [
            torch.stack([conv_norm_upper(slice, grid=max(12, 4 * side)) for slice in group.unbind(2)]).sum()
            for group in K.chunk(self.groups)
        ]
        return torch.stack(norms).amax()

    def forward(self, K: Tensor) -> Tensor:
        A = K.float() if K.dtype in LOW_PRECISION else K
        norm = self.norm(A)
        # entries are rounded by eps each: a kernel of at most eps |K_a|_F for each of its taps a
        taps = torch.linalg.vector_norm(A.detach().double().flatten(2), dim=(0, 1)).sum()
        limit = self.bound - 2 * torch.finfo(K.dtype).eps * taps * (self.bound / norm.detach().clamp(min=self.bound))
        return torch.where(norm <= limit, K, (A * (limit / norm.clamp(min=self.bound / 2)).to(A.dtype)).to(K.dtype))

    def extra_repr(self) -> str:
        return f"bound={self.bound:g}"
