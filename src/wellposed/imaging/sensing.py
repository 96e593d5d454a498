"""Random measurements of images."""

from __future__ import annotations

import math
import weakref

import torch
from torch import Tensor, nn

from wellposed._checks import check_positive_integer
from wellposed.errors import InvalidArgument, InvalidType
from wellposed.imaging._inputs import check_numbers
from wellposed.imaging.operators import ROUNDING, AbstractForwardOperator
from wellposed.linalg.directed import up

#: Q and the norm that was measured of it. Entries are compared: an object or a version would not show every change.
_MEASURED: weakref.WeakKeyDictionary[CompressedSensing, tuple[Tensor, float]] = weakref.WeakKeyDictionary()


class CompressedSensing(AbstractForwardOperator):
    """Random measurements of every image: y = Q x with orthonormal rows of Q, drawn uniformly.

    `prox_l2` is that of orthonormal rows. `norm` and `reflection` are measured of the present Q,
    whose rows are orthonormal up to the rounding of its dtype.

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

    @property
    def norm(self) -> float:  # type: ignore[override]  # it follows Q
        """The square root of |Q Q^T| <= 1 + |Q Q^T - I|_F, rounded up; infinite if an entry of the
        present Q is not finite."""
        Q = self.Q.detach()
        last = _MEASURED.get(self)
        if last is None or last[0].dtype != Q.dtype or last[0].device != Q.device or not torch.equal(last[0], Q):
            last = _MEASURED[self] = (Q.clone(), _norm_of_rows(Q.double()))
        return last[1]

    @property
    def reflection(self) -> float:  # type: ignore[override]  # it follows Q
        """With c = gamma/(1 + gamma) <= 1 it is |I - 2 c Q^T Q|."""
        return max(1.0, 2 * self.norm * self.norm - 1)

    def _check(self, x: Tensor, *, what: str = "images") -> None:
        check_numbers("CompressedSensing", x, what=what)
        if x.dtype != self.Q.dtype and not torch.is_autocast_enabled(x.device.type):
            raise InvalidType(
                f"CompressedSensing has a matrix of {self.Q.dtype} and got {what} of {x.dtype}; convert one of them, e.g. the "
                f"{what} by .to({self.Q.dtype})."
            )

    def A(self, x: Tensor) -> Tensor:
        self._check(x)
        if tuple(x.shape[1:]) != self.image_shape:
            raise InvalidArgument(f"CompressedSensing measures images {self.image_shape}; got {tuple(x.shape[1:])}.")
        return nn.functional.linear(x.flatten(1), self.Q)

    def A_adjoint(self, y: Tensor) -> Tensor:
        self._check(y, what="data")
        if y.dim() != 2 or y.shape[1] != len(self.Q):
            raise InvalidArgument(f"CompressedSensing expects data (batch, {len(self.Q)}); got {tuple(y.shape)}.")
        return (y @ self.Q).unflatten(1, self.image_shape)

    def prox_l2(self, z: Tensor, y: Tensor, gamma: float | Tensor) -> Tensor:
        check_numbers("CompressedSensing", z)
        moved = z + gamma * self.A_adjoint(y)
        return moved - gamma / (1 + gamma) * self.A_adjoint(self.A(moved))  # Q Q^T = I


def _norm_of_rows(Q: Tensor) -> float:
    """An upper bound of |Q|, sharp if the rows are orthonormal; infinite if it is not known."""
    gram = Q @ Q.t()
    excess = torch.linalg.matrix_norm(gram - torch.eye(len(gram), dtype=gram.dtype, device=gram.device))
    rows = gram.abs().sum(dim=1).max()  # bounds |Q Q^T| as well, and closely if Q is a multiple
    rounding = 2.0**-50 * Q.shape[1] * float(Q.square().sum())  # of the products
    square = up(min(1 + float(excess), float(rows)) + rounding)
    return math.sqrt(square) * (1 + ROUNDING) if math.isfinite(square) else math.inf
