r"""Images on a torus in Fourier space: spectra of fields, and symbols of convolutions.

A field (batch, C, H, W) is split into its p x p phases, so that an operator that commutes only with shifts by p (a convolution
with stride p, and its transpose) is an ordinary one of p^2 C channels on the lattice (H/p, W/p). Real fields need half of the
frequencies; sums over all of them count the others twice.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Lattice", "symbol"]


@dataclass(frozen=True)
class Lattice:
    """Fields of C channels on H x W, seen through p x p phases.

    Attributes:
        channels, height, width: C, H, W.
        phases: p; divides H and W.
    """

    channels: int
    height: int
    width: int
    phases: int = 1

    @property
    def features(self) -> int:
        """C H W."""
        return self.channels * self.height * self.width

    @property
    def size(self) -> tuple[int, int]:
        """(H/p, W/p)."""
        return self.height // self.phases, self.width // self.phases

    @property
    def bands(self) -> int:
        """p^2 C: channels of the spectrum."""
        return self.channels * self.phases**2

    def spectrum(self, z: Tensor) -> Tensor:
        """(batch, C H W) -> (frequencies, batch, p^2 C), the half spectrum."""
        p, (h, w) = self.phases, self.size
        field = z.reshape(-1, self.channels, self.height, self.width)
        if p > 1:
            field = field.reshape(-1, self.channels, h, p, w, p).permute(0, 3, 5, 1, 2, 4)
        return torch.fft.rfft2(field).reshape(field.shape[0], self.bands, -1).permute(2, 0, 1).contiguous()

    def field(self, Z: Tensor) -> Tensor:
        """(frequencies, batch, p^2 C) -> (batch, C H W): the inverse of `spectrum`."""
        p, (h, w) = self.phases, self.size
        batch = Z.shape[1]
        spectrum = Z.permute(1, 2, 0).reshape(batch, self.bands, h, w // 2 + 1)
        field = torch.fft.irfft2(spectrum, s=(h, w))
        if p > 1:
            field = field.reshape(batch, p, p, self.channels, h, w).permute(0, 3, 4, 1, 5, 2)
        return field.reshape(batch, self.features)

    def weights(self, like: Tensor) -> Tensor:
        """(frequencies,) w with <x, y> = sum_f w_f Re(conj(x_f) y_f) for fields x, y and their half spectra."""
        h, w = self.size
        count = torch.full((h, w // 2 + 1), 2.0, dtype=like.real.dtype, device=like.device)
        count[:, 0] = 1.0
        if w % 2 == 0:
            count[:, -1] = 1.0
        return count.reshape(-1) / (h * w)


def symbol(kernel: Tensor, size: tuple[int, int], phases: int = 1, *, strided: bool = False) -> Tensor:
    r"""The matrices that a circular convolution is, one per frequency.

    The convolution, as PyTorch counts, y[n] = sum_t K[t] x[n + t - k//2], between phases a of y and r of x: with
    a + t - k//2 = p q + r it reads y_a[n] = sum K[t] x_r[n + q], and the matrix at frequency f has entries
    K[t] exp(2 pi i f q/N). Kernels larger than the torus wrap around, as they should.

    Args:
        kernel: (out, in, k, k), real.
        size: (H/p, W/p) of the lattice.
        phases: p.
        strided: Keep only the phase 0 of y: a convolution with stride p.

    Returns:
        (frequencies, out or p^2 out, p^2 in) complex, differentiable in the kernel.
    """
    out, into, kh, kw = kernel.shape
    h, w = size
    left = _exponentials(h, h, kh, phases, strided, kernel.dtype, kernel.device)
    right = _exponentials(w, w // 2 + 1, kw, phases, strided, kernel.dtype, kernel.device)
    # one axis after the other: (u, a, r, k) and (v, b, s, l)
    half = torch.einsum("oikl,vbsl->oikvbs", kernel.to(right.dtype), right)
    whole = torch.einsum("oikvbs,uark->uvaborsi", half, left)
    outputs = out if strided else out * phases**2
    return whole.reshape(h * (w // 2 + 1), outputs, into * phases**2)


@functools.lru_cache(maxsize=64)
def _exponentials(
    n: int, frequencies: int, taps: int, p: int, strided: bool, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """(frequencies, output phases, input phases, taps): exp(2 pi i f q/n) where the tap leads from r to a, else 0."""
    f = torch.arange(frequencies, dtype=torch.float64)
    table = torch.zeros(frequencies, 1 if strided else p, p, taps, dtype=torch.complex128)
    for a in range(1 if strided else p):
        for t in range(taps):
            q, r = divmod(a + t - taps // 2, p)
            # q f modulo n first: the angle keeps all its digits
            table[:, a, r, t] = torch.exp(2j * math.pi * ((q * f) % n) / n)
    return table.to(device=device, dtype=torch.complex128 if dtype == torch.float64 else torch.complex64)
