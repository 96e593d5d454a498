"""The linear operators inside a unit layer: a matrix, or a convolution, with its exact transpose."""

from __future__ import annotations

import abc

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.grad import conv2d_weight

__all__ = ["AbstractOperator", "ConvOperator", "MatrixOperator", "channels_last"]


class AbstractOperator(abc.ABC):
    """z -> W z for every sample of a batch."""

    #: The tensor that W is made of.
    tensor: Tensor

    @abc.abstractmethod
    def apply(self, z: Tensor) -> Tensor:
        """(n, ...) -> (n, ...): W z."""

    @abc.abstractmethod
    def transpose(self, v: Tensor) -> Tensor:
        """(n, ...) -> (n, ...): W^T v, with <v, W z> = <W^T v, z>."""

    @abc.abstractmethod
    def cotangent(self, left: Tensor, right: Tensor) -> Tensor:
        """The derivative of sum_i <left_i, W right_i> in `tensor`."""

    @abc.abstractmethod
    def with_tensor(self, tensor: Tensor) -> AbstractOperator:
        """The same kind of operator made of another tensor."""


class MatrixOperator(AbstractOperator):
    """A matrix W (h, m): samples are rows, so W z is Z W^T."""

    def __init__(self, W: Tensor) -> None:
        self.tensor = W

    def apply(self, z: Tensor) -> Tensor:
        return z @ self.tensor.t()

    def transpose(self, v: Tensor) -> Tensor:
        return v @ self.tensor

    def cotangent(self, left: Tensor, right: Tensor) -> Tensor:
        return left.t() @ right

    def with_tensor(self, tensor: Tensor) -> MatrixOperator:
        return MatrixOperator(tensor)


class ConvOperator(AbstractOperator):
    """A convolution with a kernel K (h, c, k, k), k odd, stride 1 and zeros around the image, so that sizes are kept."""

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

    def with_tensor(self, tensor: Tensor) -> ConvOperator:
        return ConvOperator(tensor)


def channels_last(K: Tensor) -> Tensor:
    """The same kernel, channels innermost in memory: convolutions with it answer in that layout too, in half the time.

    Only in single precision; for double precision there are no such kernels on a CPU, and every product would be copied.
    """
    return K.contiguous(memory_format=torch.channels_last) if K.dtype == torch.float32 else K
