r"""Linear forward operators y = A x of imaging, with exact adjoints.

Images are real, (batch, channels, height, width). An operator has `A(x)` and `A_adjoint(y)` with
<A x, y> = <x, A^T y> (of complex data: the real part of the inner product), so it is its own
documentation of what was measured, and a `deepinv.physics.LinearPhysics` can take its place.
"""

from __future__ import annotations

import abc
import math

import torch
from torch import Tensor, nn

from wellposed._checks import check_interval, check_positive_integer
from wellposed.errors import InvalidArgument

#: Relative rounding of a Fourier transform or of a product with orthonormal rows, generously.
ROUNDING = 1e-5


class AbstractForwardOperator(nn.Module, abc.ABC):
    """y = A x, with bounds of the eigenvalues of A^T A.

    Attributes:
        norm: An upper bound of |A|.
        least: A lower bound of the least eigenvalue of A^T A, at least 0.

    Examples:
        >>> import torch, wellposed as wp
        >>> A = wp.imaging.Blur(wp.imaging.gaussian_kernel(1.0))
        >>> x, y = torch.rand(2, 1, 8, 8), torch.rand(2, 1, 8, 8)
        >>> torch.allclose((A.A(x) * y).sum(), (x * A.A_adjoint(y)).sum(), rtol=1e-4)
        True
        >>> isinstance(A, wp.imaging.AbstractForwardOperator), A.norm < 1.001
        (True, True)
    """

    norm: float = 1.0
    least: float = 0.0

    @abc.abstractmethod
    def A(self, x: Tensor) -> Tensor:
        """Measurements of images (batch, channels, height, width)."""

    @abc.abstractmethod
    def A_adjoint(self, y: Tensor) -> Tensor:
        """A^T y: (batch, channels, height, width)."""

    @abc.abstractmethod
    def prox_l2(self, z: Tensor, y: Tensor, gamma: float | Tensor) -> Tensor:
        """The minimiser of gamma/2 |A x - y|^2 + 1/2 |x - z|^2, which is
        (I + gamma A^T A)^-1 (z + gamma A^T y)."""

    def normal(self, x: Tensor) -> Tensor:
        """A^T A x."""
        return self.A_adjoint(self.A(x))

    def forward(self, x: Tensor) -> Tensor:
        """A x."""
        return self.A(x)


class Blur(AbstractForwardOperator):
    """Convolution of every channel with one kernel; the image is continued periodically.

    Args:
        kernel: (k, l) with odd sizes, for example `gaussian_kernel(2.0)` or `motion_kernel(9, 30)`.

    Examples:
        >>> import torch, wellposed as wp
        >>> blur = wp.imaging.Blur(wp.imaging.motion_kernel(5, 30))
        >>> blur.A(torch.ones(2, 3, 16, 16)).shape
        torch.Size([2, 3, 16, 16])
    """

    kernel: Tensor

    def __init__(self, kernel: Tensor) -> None:
        super().__init__()
        if kernel.dim() != 2 or kernel.shape[0] % 2 == 0 or kernel.shape[1] % 2 == 0:
            raise InvalidArgument(f"Blur expects a kernel (k, l) with odd sizes; got shape {tuple(kernel.shape)}.")
        if not bool(torch.isfinite(kernel).all()):
            raise InvalidArgument("The kernel of Blur holds NaN or infinite entries.")
        self.register_buffer("kernel", kernel.clone())
        self.norm = float(kernel.double().abs().sum()) * (1 + ROUNDING)  # Young's inequality

    def _transfer(self, x: Tensor) -> Tensor:
        """(h, w/2 + 1) the Fourier transform of the kernel, centred at the first pixel."""
        (h, w), (rows, columns) = x.shape[-2:], self.kernel.shape
        if rows > h or columns > w:
            raise InvalidArgument(f"The kernel of Blur, {rows} x {columns}, is larger than the image, {h} x {w}.")
        padded = nn.functional.pad(self.kernel.to(x.dtype), (0, w - columns, 0, h - rows))
        padded = padded.roll((-(rows // 2), -(columns // 2)), (0, 1))
        return torch.fft.rfft2(padded)

    def _filtered(self, x: Tensor, transfer: Tensor) -> Tensor:
        return torch.fft.irfft2(torch.fft.rfft2(x) * transfer, s=x.shape[-2:])

    def A(self, x: Tensor) -> Tensor:
        return self._filtered(x, self._transfer(x))

    def A_adjoint(self, y: Tensor) -> Tensor:
        return self._filtered(y, self._transfer(y).conj())

    def normal(self, x: Tensor) -> Tensor:
        return self._filtered(x, self._transfer(x).abs().square())

    def prox_l2(self, z: Tensor, y: Tensor, gamma: float | Tensor) -> Tensor:
        transfer = self._transfer(z)
        return self._filtered(z + gamma * self.A_adjoint(y), 1 / (1 + gamma * transfer.abs().square()))


class Inpainting(AbstractForwardOperator):
    """Pixels that are missing are zero.

    Args:
        mask: (height, width) or (channels, height, width): whether a pixel is measured.

    Examples:
        >>> import torch, wellposed as wp
        >>> mask = torch.tensor([[True, False], [True, True]])
        >>> wp.imaging.Inpainting(mask).A(torch.ones(1, 1, 2, 2)).flatten().tolist()
        [1.0, 0.0, 1.0, 1.0]
    """

    mask: Tensor

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        if mask.dim() not in (2, 3):
            raise InvalidArgument(f"Inpainting expects a mask (height, width); got shape {tuple(mask.shape)}.")
        self.register_buffer("mask", mask.bool())

    def A(self, x: Tensor) -> Tensor:
        return x * self.mask

    def A_adjoint(self, y: Tensor) -> Tensor:
        return y * self.mask

    def prox_l2(self, z: Tensor, y: Tensor, gamma: float | Tensor) -> Tensor:
        return torch.where(self.mask, (z + gamma * y) / (1 + gamma), z)


class CompressedSensing(AbstractForwardOperator):
    """Random measurements of every image: y = Q x with orthonormal rows of Q, drawn uniformly.

    Args:
        image_shape: (channels, height, width).
        num: How many numbers are measured, at most the number of pixels.
        generator: Draws Q.
        dtype: Of Q.

    Examples:
        >>> import torch, wellposed as wp
        >>> sensing = wp.imaging.CompressedSensing((1, 8, 8), 20, generator=torch.Generator().manual_seed(0))
        >>> sensing.A(torch.ones(3, 1, 8, 8)).shape
        torch.Size([3, 20])
    """

    Q: Tensor

    def __init__(
        self,
        image_shape: tuple[int, int, int],
        num: int,
        *,
        generator: torch.Generator | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        check_positive_integer("CompressedSensing", "num", num)
        self.image_shape = tuple(image_shape)
        pixels = math.prod(self.image_shape)
        if num > pixels:
            raise InvalidArgument(f"CompressedSensing cannot measure {num} numbers of an image with {pixels} pixels.")
        drawn = torch.randn(pixels, num, generator=generator, dtype=torch.float64)
        self.register_buffer("Q", torch.linalg.qr(drawn).Q.t().to(dtype).contiguous())
        self.norm = 1 + ROUNDING

    def A(self, x: Tensor) -> Tensor:
        if tuple(x.shape[1:]) != self.image_shape:
            raise InvalidArgument(f"CompressedSensing measures images {self.image_shape}; got {tuple(x.shape[1:])}.")
        return nn.functional.linear(x.flatten(1), self.Q)

    def A_adjoint(self, y: Tensor) -> Tensor:
        return (y @ self.Q).unflatten(1, self.image_shape)

    def prox_l2(self, z: Tensor, y: Tensor, gamma: float | Tensor) -> Tensor:
        moved = z + gamma * self.A_adjoint(y)
        return moved - gamma / (1 + gamma) * self.A_adjoint(self.A(moved))  # Q Q^T = I


class MRI(AbstractForwardOperator):
    """Single-coil magnetic resonance imaging: some coefficients of the Fourier transform.

    A complex image is two channels, its real and imaginary part; the data are complex, (batch,
    height, width), and zero where nothing is measured.

    Args:
        mask: (height, width): which coefficients are measured, with frequency 0 at [0, 0].

    Examples:
        >>> import torch, wellposed as wp
        >>> mask = torch.zeros(8, 8, dtype=torch.bool)
        >>> mask[:, ::2] = True  # every second column is measured
        >>> wp.imaging.MRI(mask).A(torch.ones(1, 2, 8, 8)).shape
        torch.Size([1, 8, 8])
    """

    mask: Tensor

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        if mask.dim() != 2:
            raise InvalidArgument(f"MRI expects a mask (height, width); got shape {tuple(mask.shape)}.")
        self.register_buffer("mask", mask.bool())
        self.norm = 1 + ROUNDING

    def A(self, x: Tensor) -> Tensor:
        if x.dim() != 4 or x.shape[1] != 2:
            raise InvalidArgument(
                f"MRI expects images (batch, 2, height, width), real and imaginary part; got {tuple(x.shape)}."
            )
        return torch.fft.fft2(torch.complex(x[:, 0], x[:, 1]), norm="ortho") * self.mask

    def A_adjoint(self, y: Tensor) -> Tensor:
        image = torch.fft.ifft2(y * self.mask, norm="ortho")
        return torch.stack([image.real, image.imag], dim=1)

    def prox_l2(self, z: Tensor, y: Tensor, gamma: float | Tensor) -> Tensor:
        moved = z + gamma * self.A_adjoint(y)
        return moved - gamma / (1 + gamma) * self.A_adjoint(self.A(moved))  # A A^T is a projection


def gaussian_kernel(sigma: float, size: int | None = None) -> Tensor:
    """(size, size) a Gaussian of sum 1.

    Args:
        sigma: Standard deviation in pixels.
        size: Odd; three standard deviations on each side if not given.

    Examples:
        >>> import torch, wellposed as wp
        >>> kernel = wp.imaging.gaussian_kernel(1.0)
        >>> kernel.shape, round(kernel.sum().item(), 4)
        (torch.Size([7, 7]), 1.0)
    """
    check_interval("gaussian_kernel", "sigma", sigma, low=0.0, closed="neither")
    size = 2 * math.ceil(3 * sigma) + 1 if size is None else size
    check_positive_integer("gaussian_kernel", "size", size)
    offsets = torch.arange(size, dtype=torch.float64) - (size - 1) / 2
    profile = torch.exp(-offsets.square() / (2 * sigma**2))
    kernel = torch.outer(profile, profile)
    return (kernel / kernel.sum()).float()


def motion_kernel(length: int, angle: float) -> Tensor:
    """(length, length) a straight motion during the exposure, of sum 1.

    Args:
        length: Of the path in pixels, odd.
        angle: In degrees, counted from the horizontal.

    Examples:
        >>> import torch, wellposed as wp
        >>> kernel = wp.imaging.motion_kernel(9, 30)
        >>> kernel.shape, round(kernel.sum().item(), 4)
        (torch.Size([9, 9]), 1.0)
    """
    check_positive_integer("motion_kernel", "length", length)
    if length % 2 == 0:
        raise InvalidArgument(f"The 'length' parameter of motion_kernel must be odd. Got {length} instead.")
    half, direction = (length - 1) / 2, math.radians(angle)
    along = torch.linspace(-half, half, 8 * length, dtype=torch.float64)
    rows, columns = half - along * math.sin(direction), half + along * math.cos(direction)
    kernel = torch.zeros(length, length, dtype=torch.float64)
    for row, column in ((rows.floor(), columns.floor()), (rows.floor() + 1, columns.floor()),
                        (rows.floor(), columns.floor() + 1), (rows.floor() + 1, columns.floor() + 1)):  # fmt: skip
        weight = (1 - (rows - row).abs()) * (1 - (columns - column).abs())  # bilinear
        inside = (row < length) & (column < length)
        kernel.index_put_((row[inside].long(), column[inside].long()), weight[inside], accumulate=True)
    return (kernel / kernel.sum()).float()
