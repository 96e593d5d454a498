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

from wellposed.errors import InvalidArgument
from wellposed.imaging._inputs import check_binary, check_mask, check_numbers, check_transform

#: Relative rounding of a Fourier transform or of a product with orthonormal rows, generously.
ROUNDING = 1e-5


class AbstractForwardOperator(nn.Module, abc.ABC):
    """y = A x, with bounds of the eigenvalues of A^T A.

    Attributes:
        norm: An upper bound of |A|, of the numbers that the operator holds now. A subclass states
            its own; with the 1 that it inherits nothing is proved.
        least: A lower bound of the least eigenvalue of A^T A, at least 0.
        reflection: An upper bound of the Lipschitz constant of z -> 2 prox_l2(z, y, gamma) - z,
            which is 1 if `prox_l2` is what it says.

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
    reflection: float = 1.0

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

    @property
    def norm(self) -> float:  # type: ignore[override]  # it follows the kernel
        """The sum of |entries| of the present kernel (Young's inequality), rounded up; infinite if
        one is not finite."""
        total = float(self.kernel.detach().double().abs().sum()) * (1 + ROUNDING)
        return total if math.isfinite(total) else math.inf

    def _transfer(self, x: Tensor) -> Tensor:
        """(h, w/2 + 1) the Fourier transform of the kernel, centred at the first pixel."""
        check_numbers("Blur", x)
        check_transform("Blur", x)
        (h, w), (rows, columns) = x.shape[-2:], self.kernel.shape
        if rows > h or columns > w:
            raise InvalidArgument(f"The kernel of Blur, {rows} x {columns}, is larger than the image, {h} x {w}.")
        padded = nn.functional.pad(self.kernel.to(x.dtype), (0, w - columns, 0, h - rows))
        padded = padded.roll((-(rows // 2), -(columns // 2)), (0, 1))
        return torch.fft.rfft2(padded)

    def _filtered(self, x: Tensor, transfer: Tensor) -> Tensor:
        if x.numel() == 0:
            return x.clone()  # no transform takes an empty batch
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
    norm = 1.0

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        check_binary("Inpainting", mask)
        if mask.dim() not in (2, 3):
            raise InvalidArgument(f"Inpainting expects a mask (height, width); got shape {tuple(mask.shape)}.")
        self.register_buffer("mask", mask.bool())

    def _measured(self, x: Tensor) -> Tensor:
        """The mask, if x fits it."""
        check_numbers("Inpainting", x)
        check_mask("Inpainting", self.mask, x.shape)
        return self.mask.bool()

    def A(self, x: Tensor) -> Tensor:
        return x * self._measured(x)

    def A_adjoint(self, y: Tensor) -> Tensor:
        return y * self._measured(y)

    def prox_l2(self, z: Tensor, y: Tensor, gamma: float | Tensor) -> Tensor:
        self._measured(y)
        return torch.where(self._measured(z), (z + gamma * y) / (1 + gamma), z)


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
    norm = 1 + ROUNDING

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        check_binary("MRI", mask)
        if mask.dim() != 2:
            raise InvalidArgument(f"MRI expects a mask (height, width); got shape {tuple(mask.shape)}.")
        self.register_buffer("mask", mask.bool())

    def _measured(self, y: Tensor) -> Tensor:
        """The coefficients that are measured, of (batch, height, width)."""
        check_mask("MRI", self.mask, y.shape)
        return y * self.mask.bool()

    def _check_image(self, x: Tensor) -> None:
        check_numbers("MRI", x)
        check_transform("MRI", x)
        if x.dim() != 4 or x.shape[1] != 2:
            raise InvalidArgument(
                f"MRI expects images (batch, 2, height, width), real and imaginary part; got {tuple(x.shape)}."
            )
        check_mask("MRI", self.mask, x[:, 0].shape)

    def A(self, x: Tensor) -> Tensor:
        self._check_image(x)
        image = torch.complex(x[:, 0], x[:, 1])
        return self._measured(torch.fft.fft2(image, norm="ortho") if x.numel() else image)

    def A_adjoint(self, y: Tensor) -> Tensor:
        check_numbers("MRI", y, what="data", complex_too=True)
        check_transform("MRI", y)
        if y.dim() != 3:
            raise InvalidArgument(f"MRI expects data (batch, height, width); got {tuple(y.shape)}.")
        coefficients = self._measured(y)
        image = torch.fft.ifft2(coefficients, norm="ortho") if y.numel() else coefficients + 0j
        return torch.stack([image.real, image.imag], dim=1)

    def prox_l2(self, z: Tensor, y: Tensor, gamma: float | Tensor) -> Tensor:
        self._check_image(z)
        moved = z + gamma * self.A_adjoint(y)
        return moved - gamma / (1 + gamma) * self.A_adjoint(self.A(moved))  # A A^T is a projection
