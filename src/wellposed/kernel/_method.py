"""What a method for the tangent kernel offers: its size, its cost, and the kernel block by block;
and what may enter it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wellposed._tree import leaves
from wellposed.errors import InvalidArgument, InvalidType, did_you_mean
from wellposed.kernel._kernel_memory import KernelMemory
from wellposed.nn.tangent import GramProduct

#: The key of the whole kernel among its parts; no parameter has an empty name.
TOTAL = ""
#: Rows and columns of a block, unless something else is asked for.
BLOCK_SIZE = 512


@dataclass(frozen=True)
class KernelLayout:
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
    """Rows and columns of the kernel; each part is (s, rows, columns), where s counts outputs or is
    1."""

    rows: slice
    columns: slice
    parts: Mapping[str, Tensor]


Done = Callable[[slice, slice], bool]


class KernelMethod(ABC):
    """A way to compute the tangent kernel between two batches.

    Attributes:
        model: Whose kernel it is.
        size, size2: Samples of the first and of the second batch.
        symmetric: The second batch is the first: blocks on and below the diagonal suffice.
        outputs: Outputs c of the model.
        vector_output: The model returns (n,), not (n, c).
        parameters: Names of the parameters that have a part in the kernel.
        dtype, device: Of the kernel.
        advice: What to do if the memory does not suffice.
        norms: Of what was computed to know the sizes, and coefficients: another model has others.
        factors: What its products are made of, by name.
        block_size: Rows and columns of a block of a store.
        continues: Whether blocks that are done can be skipped.
    """

    model: nn.Module
    size: int
    size2: int
    symmetric: bool
    outputs: int
    parameters: tuple[str, ...]
    dtype: torch.dtype
    device: torch.device
    advice: str
    norms: tuple[float, ...] = ()
    factors: tuple[tuple[tuple[str, str], ...], ...] = ()
    block_size: int = BLOCK_SIZE
    continues: bool = False

    def shape(self, layout: KernelLayout) -> tuple[int, int, int]:
        """(s, N, M) of one part of the kernel."""
        c = self.outputs
        return (c, self.size, self.size2) if layout.per_output else (1, self.size * c, self.size2 * c)

    def entries(self, rows: slice, columns: slice) -> int:
        """Of a block, with its transpose in a symmetric kernel."""
        twice = self.symmetric and rows != columns
        return (rows.stop - rows.start) * (columns.stop - columns.start) * (2 if twice else 1)

    def kernel_bytes(self, layout: KernelLayout) -> int:
        s, rows, columns = self.shape(layout)
        return (len(self.parameters) if layout.by_parameter else 1) * s * rows * columns * self.dtype.itemsize

    @abstractmethod
    def memory(self, layout: KernelLayout) -> KernelMemory:
        """The estimate, before the expensive part of the work."""

    @abstractmethod
    def blocks(self, layout: KernelLayout, done: Done | None = None) -> Iterator[Block]:
        """Blocks that cover the kernel, or its lower triangle if `symmetric`; a block is valid
        until the next one. What is done already comes without parts, where a method can skip it."""

    @abstractmethod
    def product(self, v: Tensor, *, transposed: bool) -> Tensor:
        """K v, or K^T v, for v (N, q), without the matrix."""

    @abstractmethod
    def diagonal(self) -> Tensor:
        """(N,) of the kernel of a batch with itself."""

    @abstractmethod
    def gram_terms(self) -> tuple[dict[str, Tensor], list[GramProduct]]:
        """name -> (n, k) features of the first batch, and the kernel as Gram products of them; for
        one output."""

    @abstractmethod
    def rounding_upper(self, trace: float) -> float:
        """Upper bound on the Frobenius norm of the rounding error of the computed kernel, given its
        ingredients.

        The ingredients (features, gradients) count as exact, and the batches must be the same.

        Args:
            trace: Of the computed kernel.
        """


def slices(size: int, step: int) -> list[slice]:
    return [slice(start, min(start + step, size)) for start in range(0, size, step)]


def check_model(model: Any, function: str) -> None:
    if not isinstance(model, nn.Module):
        raise InvalidType(f"{function}: model must be a torch.nn.Module, got {type(model).__name__}. Wrap a function in one.")


def check_batches(X: Any, X2: Any, function: str) -> None:
    """X and, unless it is None, X2: tensors of at least one sample, finite, of equal kind."""
    _check_batch(X, "X", function)
    if X2 is None:
        return
    _check_batch(X2, "X2", function)
    seen = [(tuple(batch.shape[1:]), batch.dtype, batch.device) for batch in (X, X2)]
    for what, first, second in zip(("samples of the shape", "the dtype", "the device"), *seen, strict=True):
        if first != second:
            raise InvalidArgument(f"{function}: X2 must have {what} of X, {first}; got {second}.")


def _check_batch(X: Any, name: str, function: str) -> None:
    if not isinstance(X, Tensor):
        several = any(isinstance(part, Tensor) for part in leaves(X))
        what = " of tensors" if several else ""
        advice = "Wrap the model in a Module that takes one tensor, and splits it." if several else "Use torch.as_tensor."
        raise InvalidType(f"{function}: {name} must be a torch.Tensor, got {type(X).__name__}{what}. {advice}")
    if X.dim() == 0 or X.numel() == 0:
        raise InvalidArgument(
            f"{function}: {name} must hold at least one sample, samples first, got shape {tuple(X.shape)}. "
            "For a single sample give shape (1, features)."
        )
    if X.is_complex():
        raise InvalidArgument(f"{function}: {name} must be real, got {X.dtype}. Give real and imaginary parts as features.")
    if X.is_floating_point() and not bool(torch.isfinite(X).all()):
        row = int((~torch.isfinite(X)).flatten(1 if X.dim() > 1 else 0).nonzero()[0, 0])
        raise InvalidArgument(
            f"{function}: {name} must be finite, got NaN or infinity in row {row}. Clean or drop that sample."
        )


def check_option(value: Any, known: tuple[str, ...], name: str, function: str) -> None:
    if value not in known:
        hint = did_you_mean(value, known) if isinstance(value, str) else ""
        raise InvalidArgument(f"{function}: {name} must be one of {', '.join(map(repr, known))}; got {value!r}.{hint}")


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that require gradients, by name; a parameter used twice appears once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
