"""What every road to a kernel offers: its size, what it will cost, and the kernel block by block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.kernel._memory import KernelMemory

__all__ = ["TOTAL", "AbstractRoad", "Block", "Layout", "slices"]

#: The key of the whole kernel among its parts; no parameter has an empty name.
TOTAL = ""


@dataclass(frozen=True)
class Layout:
    """How the kernel is wanted.

    Attributes:
        by_parameter: One kernel per parameter instead of their sum.
        per_output: (c, n, n2), output by output, instead of (n c, n2 c).
        in_memory: Whether the result is a tensor rather than a file.
    """

    by_parameter: bool = False
    per_output: bool = False
    in_memory: bool = True


@dataclass(frozen=True)
class Block:
    """Rows and columns of the kernel; each part is (s, rows, columns), where s counts outputs or is 1."""

    rows: slice
    columns: slice
    parts: Mapping[str, Tensor]


class AbstractRoad(ABC):
    """A way to compute the tangent kernel between two batches.

    Attributes:
        size, size2: Samples of the first and of the second batch.
        symmetric: The second batch is the first: blocks on and below the diagonal suffice.
        outputs: Outputs c of the model.
        vector_output: The model returns (n,), not (n, c).
        parameters: Names of the parameters that have a part in the kernel.
        dtype, device: Of the kernel.
        advice: What to do if the memory does not suffice.
    """

    size: int
    size2: int
    symmetric: bool
    outputs: int
    parameters: tuple[str, ...]
    dtype: torch.dtype
    device: torch.device
    advice: str

    def shape(self, layout: Layout) -> tuple[int, int, int]:
        """(s, N, M) of one part of the kernel."""
        c = self.outputs
        return (c, self.size, self.size2) if layout.per_output else (1, self.size * c, self.size2 * c)

    def kernel_bytes(self, layout: Layout) -> int:
        s, rows, columns = self.shape(layout)
        return (len(self.parameters) if layout.by_parameter else 1) * s * rows * columns * self.dtype.itemsize

    @abstractmethod
    def memory(self, layout: Layout) -> KernelMemory:
        """The estimate, before the expensive part of the work."""

    @abstractmethod
    def blocks(self, layout: Layout) -> Iterator[Block]:
        """Blocks that cover the kernel, or its lower triangle if `symmetric`; a block is valid until the next one."""

    @abstractmethod
    def rounding_upper(self, trace: float) -> float:
        """Upper bound on the Frobenius norm of the rounding error of the computed kernel, given its ingredients.

        The ingredients (features, gradients) count as exact, and the batches must be the same.

        Args:
            trace: Of the computed kernel.
        """


def slices(size: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]
