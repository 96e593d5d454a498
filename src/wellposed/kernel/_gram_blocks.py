"""Sums of Hadamard products of Gram matrices, block by block, and their products with vectors.

Every Gram block is computed once and shared by all terms, into memory that the next block uses
again; the products are accumulated in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from wellposed.kernel._method import TOTAL, slices
from wellposed.nn.tangent import GramProduct

Terms = Mapping[str, tuple[GramProduct, ...]]


class GramBlocks:
    """Blocks of sum_t coefficient_t prod_k L_k R_k^T (entrywise), part by part.

    Args:
        left, right: name -> (n, k) and (n2, k), features of the first and of the second batch.
        terms: parameter -> its Gram products.
        block_size: Largest number of rows and of columns of a block.
        symmetric: `left` and `right` are the same.
    """

    def __init__(
        self, left: Mapping[str, Tensor], right: Mapping[str, Tensor], terms: Terms, *, block_size: int, symmetric: bool
    ) -> None:
        self.left, self.right, self.terms, self.symmetric = left, right, terms, symmetric
        some = next(iter(left.values()))
        self._like = some
        self._capacity = min(block_size, some.shape[0]) * min(block_size, next(iter(right.values())).shape[0])
        self._buffers: dict[object, Tensor] = {}

    def block(self, rows: slice, columns: slice, *, by_parameter: bool) -> dict[str, Tensor]:
        """(1, rows, columns) of every part; valid until the next call."""
        shape = (rows.stop - rows.start, columns.stop - columns.start)
        grams: dict[tuple[str, str], Tensor] = {}
        parts: dict[str, Tensor] = {}
        for parameter, terms in self.terms.items():
            name = parameter if by_parameter else TOTAL
            if name not in parts:
                parts[name] = self._buffer(("part", name), shape).zero_()
            for term in terms:
                factors = [self._gram(pair, rows, columns, grams) for pair in term.factors]
                self._accumulate(parts[name], factors, term.coefficient)
        return {name: part.unsqueeze(0) for name, part in parts.items()}

    def _gram(self, pair: tuple[str, str], rows: slice, columns: slice, grams: dict[tuple[str, str], Tensor]) -> Tensor:
        if pair not in grams:
            left, right = pair
            if self.symmetric and rows == columns and (right, left) in grams:
                grams[pair] = grams[right, left].mT
            else:
                L, R = self.left[left][rows], self.right[right][columns]
                out = self._buffer(pair, (L.shape[0], R.shape[0]))
                grams[pair] = torch.mm(L, R.mT, out=out)
        return grams[pair]

    def _accumulate(self, part: Tensor, factors: list[Tensor], coefficient: float) -> None:
        if len(factors) == 1:
            part.add_(factors[0], alpha=coefficient)
            return
        product = factors[0]
        for factor in factors[1:-1]:
            product = torch.mul(product, factor, out=self._buffer("product", (part.shape[0], part.shape[1])))
        part.addcmul_(product, factors[-1], value=coefficient)

    def _buffer(self, key: object, shape: tuple[int, int]) -> Tensor:
        if key not in self._buffers:
            self._buffers[key] = self._like.new_empty(self._capacity)
        return self._buffers[key][: shape[0] * shape[1]].view(shape)

    @staticmethod
    def buffers(terms: Terms, *, by_parameter: bool) -> int:
        """How many buffers blocks of these terms take."""
        pairs = {pair for products in terms.values() for term in products for pair in term.factors}
        longest = max(len(term.factors) for products in terms.values() for term in products)
        return len(pairs) + (len(terms) if by_parameter else 1) + (longest > 2)


def gram_product(
    left: Mapping[str, Tensor],
    right: Mapping[str, Tensor],
    terms: Sequence[GramProduct],
    v: Tensor,
    *,
    block_size: int,
    symmetric: bool,
) -> Tensor:
    """(n, q): the sum of the Gram products of features, times v (n2, q), by the cheaper of two
    ways.

    Args:
        left, right: name -> (n, k) and (n2, k).
        terms: The kernel.
        v: (n2, q).
        block_size: Rows and columns of a block, where blocks are formed.
        symmetric: `left` and `right` are the same.
    """
    n, n2, q = next(iter(left.values())).shape[0], v.shape[0], v.shape[1]
    widths = {name: feature.shape[1] for name, feature in left.items()}
    pairs = {pair for term in terms for pair in term.factors}
    forming = n * n2 * (sum(widths[name] for name, _ in pairs) + q)
    structured = 0
    for term in terms:
        k = [widths[name] for name, _ in term.factors]
        structured += q * (n + n2) * (k[0] if len(k) == 1 else k[0] * k[1])
    result = torch.zeros(n, q, dtype=v.dtype, device=v.device)
    if forming <= structured or any(len(term.factors) > 2 for term in terms):
        grams = GramBlocks(left, right, {TOTAL: tuple(terms)}, block_size=block_size, symmetric=symmetric)
        return _product_by_blocks(grams, v, result, block_size)
    for term in terms:
        (a, b), *rest = term.factors
        if not rest:
            result.addmm_(left[a], right[b].mT @ v, alpha=term.coefficient)
            continue
        ((a2, b2),) = rest
        for column in range(q):
            M = right[b].mT @ (v[:, column, None] * right[b2])
            result[:, column].add_(torch.linalg.vecdot(left[a] @ M, left[a2]), alpha=term.coefficient)
    return result


def _product_by_blocks(grams: GramBlocks, v: Tensor, result: Tensor, block_size: int) -> Tensor:
    for rows in slices(result.shape[0], block_size):
        for columns in slices(v.shape[0], block_size):
            result[rows].addmm_(grams.block(rows, columns, by_parameter=False)[TOTAL][0], v[columns])
    return result
