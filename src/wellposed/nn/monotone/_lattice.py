r"""Images on a torus in Fourier space: spectra of fields, symbols of convolutions, and their norms.

A field (batch, C, H, W) is split into its p x p phases. An operator that commutes only with shifts
by p (a convolution with stride p, and its transpose) then is an ordinary one of p^2 C channels on
the lattice (H/p, W/p). Real fields need half of the frequencies; sums over all frequencies count
the others twice.

On lattices of usual size a transform is two products with the matrices of the one-dimensional
transforms, which leave the frequencies first, as the operators need them: that is faster than a
fast transform and the copies around it.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

#: Side up to which a transform is a product with its matrix, whose cost per pixel grows with the
#: side.
LARGEST_PRODUCT = 96


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
        return _forward(field.reshape(field.shape[0], self.bands, h, w))

    def field(self, Z: Tensor) -> Tensor:
        """(frequencies, batch, p^2 C) -> (batch, C H W): the inverse of `spectrum`."""
        p, (h, w) = self.phases, self.size
        batch = Z.shape[1]
        field = _backward(Z, h, w)
        if p > 1:
            field = field.reshape(batch, p, p, self.channels, h, w).permute(0, 3, 4, 1, 5, 2)
        return field.reshape(batch, self.features)

    def weights(self, like: Tensor) -> Tensor:
        """(frequencies,) w with <x, y> = sum_f w_f Re(conj(x_f) y_f) for half spectra x_f, y_f."""
        h, w = self.size
        count = torch.full((w // 2 + 1, h), 2.0, dtype=like.real.dtype, device=like.device)
        count[0] = 1.0
        if w % 2 == 0:
            count[-1] = 1.0
        return count.reshape(-1) / (h * w)


def symbol(kernel: Tensor, size: tuple[int, int], phases: int = 1, *, strided: bool = False) -> Tensor:
    r"""The matrices that a circular convolution is, one per frequency.

    The convolution, as PyTorch counts, y[n] = sum_t K[t] x[n + t - k//2], between phases a of y and
    r of x: with a + t - k//2 = p q + r it reads y_a[n] = sum K[t] x_r[n + q], and the matrix at
    frequency f has entries K[t] exp(2 pi i f q/N). Kernels larger than the torus wrap around, as
    they should.

    Args:
        kernel: (out, in, k, k), real.
        size: (H/p, W/p) of the lattice.
        phases: p.
        strided: Keep only the phase 0 of y: a convolution with stride p.

    Returns:
        (frequencies, out or p^2 out, p^2 in) complex, differentiable in the kernel; frequencies
        along the width, halved, are the slow index.
    """
    out, into, kh, kw = map(int, kernel.shape)  # torch.jit.trace has tensors there
    h, w = size
    left = _exponentials(h, h, kh, phases, strided, kernel.dtype, kernel.device)
    right = _exponentials(w, w // 2 + 1, kw, phases, strided, kernel.dtype, kernel.device)
    # one axis after the other: (u, a, r, k) and (v, b, s, l)
    half = torch.einsum("oikl,vbsl->oikvbs", kernel.to(right.dtype), right)
    whole = torch.einsum("oikvbs,uark->vuaborsi", half, left)
    outputs = out if strided else out * phases**2
    return whole.reshape((w // 2 + 1) * h, outputs, into * phases**2)


def _forward(field: Tensor) -> Tensor:
    """(batch, bands, h, w) -> (frequencies, batch, bands): sums of exp(-2 pi i (u m/h + v n/w))."""
    batch, bands, h, w = field.shape
    half = w // 2 + 1
    if max(h, w) > LARGEST_PRODUCT:
        spectrum = torch.fft.rfft2(field).permute(3, 2, 0, 1)
        return spectrum.reshape(half * h, batch, bands)
    along, across = _transforms(h, w, field.dtype, field.device)
    parts = torch.mm(along, field.reshape(-1, w).t()).view(2, half, batch * bands, h)
    rows = torch.complex(parts[0], parts[1])
    return torch.bmm(across.expand(half, h, h), rows.transpose(1, 2)).view(half * h, batch, bands)


def _backward(Z: Tensor, h: int, w: int) -> Tensor:
    """(frequencies, batch, bands) -> (batch, bands, h, w): the inverse of `_forward`."""
    batch, bands = Z.shape[1:]
    half = w // 2 + 1
    if max(h, w) > LARGEST_PRODUCT:
        return torch.fft.irfft2(Z.view(half, h, batch, bands).permute(2, 3, 1, 0), s=(h, w))
    along, across = _inverse_transforms(h, w, Z.real.dtype, Z.device)
    rows = torch.bmm(Z.reshape(half, h, -1).transpose(1, 2), across.expand(half, h, h))  # (half, batch bands, h)
    parts = torch.view_as_real(rows).permute(3, 0, 1, 2).reshape(2 * half, -1)
    return torch.mm(parts.t(), along).view(batch, bands, h, w)


@functools.lru_cache(maxsize=64)
def _transforms(h: int, w: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines over -sines of the half transform of the width, (h, h) transform of the height."""
    width, height = _roots(w, w // 2 + 1).conj(), _roots(h, h).conj()
    along = torch.cat([width.real, width.imag])
    return along.to(device, dtype), height.to(device, _complex(dtype))


@functools.lru_cache(maxsize=64)
def _inverse_transforms(h: int, w: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """The inverses; along the width all frequencies but 0 and w/2 count twice."""
    count = torch.full((w // 2 + 1, 1), 2.0, dtype=torch.float64)
    count[0] = 1.0
    if w % 2 == 0:
        count[-1] = 1.0
    width = _roots(w, w // 2 + 1) * count / (h * w)
    along = torch.cat([width.real, -width.imag])
    return along.to(device, dtype), _roots(h, h).to(device, _complex(dtype))


def _roots(n: int, frequencies: int) -> Tensor:
    """(frequencies, n) exp(2 pi i f m/n)."""
    powers = torch.outer(torch.arange(frequencies), torch.arange(n)) % n  # first: the angle keeps all its digits
    return torch.exp(2j * math.pi * powers.double() / n)


def _complex(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype == torch.float64 else torch.complex64


@functools.lru_cache(maxsize=64)
def _exponentials(
    n: int, frequencies: int, taps: int, p: int, strided: bool, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """(frequencies, phases out, phases in, taps) exp(2 pi i f q/n) where the tap leads r to a."""
    f = torch.arange(frequencies, dtype=torch.float64)
    table = torch.zeros(frequencies, 1 if strided else p, p, taps, dtype=torch.complex128)
    for a in range(1 if strided else p):
        for t in range(taps):
            q, r = divmod(a + t - taps // 2, p)
            # q f modulo n first: the angle keeps all its digits
            table[:, a, r, t] = torch.exp(2j * math.pi * ((q * f) % n) / n)
    return table.to(device=device, dtype=_complex(dtype))


#: |G^(2^k)|_F^(1/2^k) exceeds the norm of G by a factor of at most n^(1/2^(k+1)): 4 % for n = 100
#: and k = 5.
SQUARINGS = 5


def largest_norm_upper(M: Tensor) -> float:
    r"""An upper bound of the largest spectral norm in a batch, by squaring G = M^H M:

        |M|^2 = |G| <= |G^(2^k)|_F^(2^-k)

    Products are in double precision; each squaring, divided by its Frobenius norm first, errs by at
    most 4 (n + 2) u in that norm (Chapter 3 of [higham2002], complex arithmetic), and a root halves
    relative errors as often as squaring doubled them, so the sum of all is below 8 (k + 2)(n + 2) u
    of the result, which is added.

    Args:
        M: (batch, n, k) real or complex.
    """
    M = M.detach().to(torch.complex128 if M.is_complex() else torch.float64)
    if M.numel() == 0:
        return 0.0
    if M.shape[1] < M.shape[2]:
        M = M.mH  # the smaller Gram matrix
    G = M.mH @ M
    n = max(M.shape[1], M.shape[2])
    size = torch.linalg.vector_norm(G, dim=(1, 2))
    log = torch.zeros_like(size)
    for k in range(SQUARINGS):
        safe = torch.where(size > 0, size, 1.0)
        log = log + safe.log() / 2**k
        G = G / safe[:, None, None]
        G = G @ G
        size = torch.linalg.vector_norm(G, dim=(1, 2))
    log = log + torch.where(size > 0, size, 1.0).log() / 2**SQUARINGS
    nonzero = torch.linalg.vector_norm(M, dim=(1, 2)) > 0
    if not bool(nonzero.any()):
        return 0.0
    slack = 1.0 + 8 * (SQUARINGS + 2) * (n + 2) * 2.0**-53
    # No more than the Frobenius norm, which bounds too.
    upper = math.exp(float(log[nonzero].max()) / 2)
    return min(upper, float(torch.linalg.vector_norm(M, dim=(1, 2)).max())) * slack
