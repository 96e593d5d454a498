"""Kernels as functions of rows: of inputs, or of the features that a network has of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.errors import InvalidArgument
from wellposed.kernel._closed_form import is_view_of
from wellposed.kernel._gram_blocks import GramBlocks, gram_product
from wellposed.kernel._method import BLOCK_SIZE, TOTAL
from wellposed.kernel.deq_limit import deq_ntk
from wellposed.kernel.empirical import choose_method
from wellposed.nn.tangent import GramProduct


class RowKernel(ABC):
    """k(a, b) of rows a and b, with hyper-parameters as tensors."""

    @abstractmethod
    def matrix(self, A: Tensor, B: Tensor, *hyper: Tensor) -> Tensor:
        """(n, n2), differentiable where the kernel is."""

    def product(self, A: Tensor, B: Tensor, v: Tensor) -> Tensor | None:
        """(n, q) k(A, B) v without the matrix, or None where only blocks can do it."""
        return None


class FeatureKernel(RowKernel):
    """The tangent kernel as a function of the features of each sample, side by side in a row."""

    def __init__(self, terms: Sequence[GramProduct], widths: dict[str, int]) -> None:
        self.terms, self.widths = tuple(terms), widths

    def _parts(self, A: Tensor) -> dict[str, Tensor]:
        return dict(zip(self.widths, A.split(list(self.widths.values()), dim=1), strict=True))

    def matrix(self, A: Tensor, B: Tensor, *hyper: Tensor) -> Tensor:
        terms, size = {TOTAL: self.terms}, max(A.shape[0], B.shape[0])
        grams = GramBlocks(self._parts(A), self._parts(B), terms, block_size=size, symmetric=A is B)
        whole = (slice(0, A.shape[0]), slice(0, B.shape[0]))
        K = grams.block(*whole, by_parameter=False)[TOTAL][0]
        return (K + K.mT) / 2 if A is B else K

    def product(self, A: Tensor, B: Tensor, v: Tensor) -> Tensor | None:
        options: Any = {"block_size": BLOCK_SIZE, "symmetric": is_view_of(A, B) and A.shape == B.shape}
        return gram_product(self._parts(A), self._parts(B), self.terms, v, **options)


class WideFunction(RowKernel):
    """`deq_ntk` of rows, by the weight variance."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options

    def matrix(self, A: Tensor, B: Tensor, *hyper: Tensor) -> Tensor:
        return deq_ntk(A, None if B is A else B, weight_variance=hyper[0].reshape(()), **self.options)


def network_rows(network: nn.Module, X: Tensor, function: str) -> tuple[Tensor, FeatureKernel]:
    """(n, k) features of the samples, side by side, and the tangent kernel as a function of
    them."""
    chosen = choose_method(network, X.detach(), function=function)
    if chosen.outputs != 1:
        raise InvalidArgument(
            f"{function}: the network must have one output, got {chosen.outputs}. Make a kernel for each output."
        )
    parts, terms = chosen.gram_terms()
    return torch.cat(list(parts.values()), dim=1), FeatureKernel(terms, {name: part.shape[1] for name, part in parts.items()})
