"""The parametrization of monotone convolutions: kernels in, operators with a margin out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from wellposed._checks import check_interval, check_positive_integer
from wellposed.errors import InvalidArgument
from wellposed.nn.maps.operator import AbstractOperator, OperatorCache
from wellposed.nn.monotone._fourier import FourierOperator, coupling_symbol, diagonal_symbol
from wellposed.nn.monotone._lattice import Lattice
from wellposed.nn.monotone._zero_padded import ZeroPaddedOperator

PADDINGS = ("circular", "zeros")


class TierWeights(nn.Module):
    r"""Kernels of W = (1 - m) I - A^T A + B - B^T on resolutions that halve from tier to tier.

    A is block lower-bidiagonal, with convolutions A_i within tiers and convolutions C_i of stride 2
    from each tier to the next; so is B, with B_i within tiers and B_(i+1,i) = -A_(i+1)^T C_i, which
    is chosen so that W is block *lower* triangular [winston2020, Section 5]: with
    S_i = B_i - B_i^T,

        W_ii = (1 - m) I - A_i^T A_i - C_i^T C_i + S_i,      W_(i+1,i) = -2 A_(i+1)^T C_i

    Whatever the kernels are, sym(I - W) = m I + A^T A >= m I. One tier is a single convolution.

    Args:
        channels: Of the tiers, finest first.
        kernel_size: Of A, B and C; any. An even one is a kernel of the next odd size whose last row
            and column vanish.
        margin: m, positive.
        padding: "circular" (resolvents by Fourier transforms) or "zeros" (by the inverse matrix up
            to 2048 features, then by conjugate gradients: expensive where `scale` is well above 1).
        scale: Kernels start from N(0, scale^2/(C k^2)), so that |A|, |B|, |C| are about 2 `scale`
            or less.
        generator: Of the initialization.
        device, dtype: Of the parameters.

    Attributes:
        A, B: Lists of (C_i, C_i, k, k). C: List of (C_(i+1), C_i, k, k).
    """

    def __init__(
        self,
        channels: Sequence[int],
        kernel_size: int = 3,
        *,
        margin: float = 0.1,
        padding: str = "circular",
        scale: float = 0.5,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        channels = tuple(channels)
        for width in (*channels, kernel_size):
            check_positive_integer("TierWeights", "channels" if width != kernel_size else "kernel_size", width)
        check_interval("TierWeights", "margin", margin, low=0.0)
        check_interval("TierWeights", "scale", scale, low=0.0)
        if padding not in PADDINGS:
            raise InvalidArgument(f"The 'padding' parameter must be one of {', '.join(PADDINGS)}. Got {padding!r} instead.")
        self.channels, self.kernel_size, self.margin, self.padding = channels, kernel_size, margin, padding
        draw: dict[str, Any] = {"generator": generator, "device": device, "dtype": dtype}

        def kernel(out: int, into: int) -> nn.Parameter:
            spread = scale / math.sqrt(into * kernel_size**2)
            return nn.Parameter(spread * torch.randn(out, into, kernel_size, kernel_size, **draw))

        self.A = nn.ParameterList(kernel(c, c) for c in channels)
        self.B = nn.ParameterList(kernel(c, c) for c in channels)
        self.C = nn.ParameterList(kernel(after, c) for c, after in zip(channels, channels[1:], strict=False))

    def lattices(self, height: int, width: int) -> tuple[Lattice, ...]:
        """The lattices of the tiers; raises if the size cannot be halved often enough."""
        tiers = len(self.channels)
        unit = 2 ** (tiers - 1)
        if height % unit or width % unit or height < 1 or width < 1:
            raise InvalidArgument(
                f"{tiers} tiers need a height and width divisible by {unit}; got {height} x {width}. Pad or crop the images."
            )
        return tuple(Lattice(c, height // 2**i, width // 2**i, 2 if i + 1 < tiers else 1) for i, c in enumerate(self.channels))

    def operator(self, height: int, width: int, memory: OperatorCache | None = None, *, lift: bool = False) -> AbstractOperator:
        """W for images of that size, with a graph to the kernels; in float32 at least if `lift`."""
        lattices = self.lattices(height, width)

        def odd(kernel: Tensor) -> Tensor:
            kernel = kernel.float() if lift else kernel
            return kernel if self.kernel_size % 2 else nn.functional.pad(kernel, (0, 1, 0, 1))

        A = tuple(odd(x) for x in self.A)
        C = tuple(odd(x) for x in self.C)
        # the transpose of a convolution is the one with the flipped kernel, channels exchanged
        S = tuple(x - x.flip(2, 3).transpose(0, 1) for x in map(odd, self.B))
        if self.padding == "zeros":
            return ZeroPaddedOperator(A, S, C, lattices, margin=self.margin, memory=memory)
        diagonal = tuple(
            diagonal_symbol(A[i], S[i], C[i] if i < len(C) else None, lattice, self.margin)
            for i, lattice in enumerate(lattices)
        )
        coupling = tuple(coupling_symbol(A[i + 1], C[i], lattices[i + 1]) for i in range(len(C)))
        return FourierOperator(diagonal, coupling, lattices, margin=self.margin, memory=memory)

    def extra_repr(self) -> str:
        return f"channels={self.channels}, kernel_size={self.kernel_size}, margin={self.margin}, padding={self.padding!r}"
