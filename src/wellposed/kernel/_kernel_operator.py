"""A kernel of rows as an operator of linear_operator, in blocks."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor

from wellposed.errors import MissingPackage, how_to_install
from wellposed.kernel._closed_form import is_view_of
from wellposed.kernel._method import slices
from wellposed.kernel._rows import RowKernel

LinearOperator: Any = object  # without the packages the module can still be imported and read
#: Whether gpytorch or linear_operator is not installed.
MISSING = any(importlib.util.find_spec(name) is None for name in ("gpytorch", "linear_operator"))
if not MISSING:
    LinearOperator = importlib.import_module("linear_operator").LinearOperator

BLOCK_SIZE = 512
#: Bytes of blocks that an operator keeps for its next product.
MEMORY = 2**30
#: Entries of the diagonal are taken from blocks of this size.
_DIAGONAL = 32


class KernelOperator(LinearOperator):
    """A kernel between two sets of rows as a `linear_operator.LinearOperator`: products, solves and
    log-determinants without the matrix.

    A product forms blocks and drops them, unless all of them fit into `memory`, or the kernel has
    structured products (`TangentKernel`). Of a kernel of one set of rows only the blocks below the
    diagonal are formed. Derivatives are accumulated block by block as well. One matrix, no batches
    of them.

    Args:
        x1, x2: (n, k) and (n2, k) rows: inputs, or features of them.
        hyper: Hyper-parameters of the kernel, tensors.
        function: The kernel of rows.
        block_size: Rows and columns of a block.
        memory: Bytes of blocks that may be kept between products.
    """

    def __init__(
        self,
        x1: Tensor,
        x2: Tensor,
        *hyper: Tensor,
        function: RowKernel,
        block_size: int = BLOCK_SIZE,
        memory: int = MEMORY,
    ) -> None:
        check_installed("KernelOperator")
        super().__init__(x1, x2, *hyper, function=function, block_size=block_size, memory=memory)
        self.x1, self.x2, self.hyper, self.function, self.block_size = x1, x2, hyper, function, block_size
        self.symmetric = is_view_of(x1, x2) and x1.shape == x2.shape
        kept = x1.shape[0] * x2.shape[0] * x1.element_size() // (2 if self.symmetric else 1)
        self._blocks: dict[tuple[int, int], Tensor] | None = {} if kept <= memory else None

    def _with(self, x1: Tensor, x2: Tensor) -> KernelOperator:
        return self.__class__(x1, x2, *self.hyper, **self._nondifferentiable_kwargs)

    def _size(self) -> torch.Size:
        return torch.Size((self.x1.shape[0], self.x2.shape[0]))

    def _transpose_nonbatch(self) -> KernelOperator:
        return self._with(self.x2, self.x1)

    def _getitem(self, row_index: Any, col_index: Any, *batch_indices: Any) -> KernelOperator:
        return self._with(self.x1[row_index], self.x2[col_index])

    def _get_indices(self, row_index: Any, col_index: Any, *batch_indices: Any) -> Tensor:
        row, column = torch.broadcast_tensors(row_index, col_index)
        (rows, i), (columns, j) = row.unique(return_inverse=True), column.unique(return_inverse=True)
        if len(rows) * len(columns) <= _DIAGONAL * row.numel():
            return self.function.matrix(self.x1[rows], self.x2[columns], *self.hyper)[i, j]
        return self._pairs(self.x1[row.reshape(-1)], self.x2[column.reshape(-1)]).reshape(row.shape)

    def _diagonal(self) -> Tensor:
        return self._pairs(self.x1, self.x2)

    def _pairs(self, A: Tensor, B: Tensor) -> Tensor:
        parts = [self.function.matrix(A[some], B[some], *self.hyper).diagonal() for some in slices(len(A), _DIAGONAL)]
        return torch.cat(parts)

    def to_dense(self) -> Tensor:
        one = self.symmetric and not self.x1.requires_grad and not self.x2.requires_grad  # else each has its own gradient
        x2 = self.x1 if one else self.x2
        return self.function.matrix(self.x1, x2, *self.hyper)

    def _matmul(self, rhs: Tensor) -> Tensor:
        vector = rhs.dim() == 1
        v = rhs.unsqueeze(-1) if vector else rhs
        flat = _columns(v)
        result = self.function.product(self.x1, self.x2, flat)
        if result is None:
            result = self._product_by_blocks(flat)
        result = result.reshape(-1, *v.shape[:-2], v.shape[-1]).movedim(0, -2)
        return result.squeeze(-1) if vector else result

    def _product_by_blocks(self, v: Tensor) -> Tensor:
        result = v.new_zeros(self.x1.shape[0], v.shape[1])
        for rows in slices(self.x1.shape[0], self.block_size):
            for columns in slices(self.x2.shape[0], self.block_size):
                if self.symmetric and columns.start > rows.start:
                    continue
                block = self._block(rows, columns)
                result[rows] += block @ v[columns]
                if self.symmetric and columns.start < rows.start:
                    result[columns] += block.mT @ v[rows]
        return result

    def _block(self, rows: slice, columns: slice) -> Tensor:
        place = (rows.start, columns.start)
        if self._blocks is not None and place in self._blocks:
            return self._blocks[place]
        A = self.x1[rows]
        B = A if self.symmetric and rows == columns else self.x2[columns]
        block = self.function.matrix(A, B, *self.hyper)
        if self._blocks is not None and not block.requires_grad:
            self._blocks[place] = block
        return block

    def _bilinear_derivative(self, left_vecs: Tensor, right_vecs: Tensor) -> tuple[Tensor | None, ...]:
        """Derivatives of sum_c u_c^T K v_c by rows and hyper-parameters."""
        args = [arg.detach().requires_grad_(arg.requires_grad) for arg in self._args]
        wanted = [arg for arg in args if arg.requires_grad]
        totals = {id(arg): torch.zeros_like(arg) for arg in wanted}
        left, right = (_columns(vectors.detach()) for vectors in (left_vecs, right_vecs))
        if wanted:
            for rows in slices(self.x1.shape[0], self.block_size):
                for columns in slices(self.x2.shape[0], self.block_size):
                    with torch.enable_grad():
                        block = self.function.matrix(args[0][rows], args[1][columns], *args[2:])
                    weights = left[rows] @ right[columns].mT
                    if block.requires_grad:
                        for arg, grad in zip(
                            wanted, torch.autograd.grad(block, wanted, weights, allow_unused=True), strict=True
                        ):
                            if grad is not None:
                                totals[id(arg)] += grad
        return tuple(totals.get(id(arg)) for arg in args)


def _columns(v: Tensor) -> Tensor:
    """(..., n, q) -> (n, all columns)."""
    return v.movedim(-2, 0).reshape(v.shape[-2], -1)


def check_installed(name: str) -> None:
    """Raises `MissingPackage` without gpytorch and linear_operator."""
    if MISSING:
        raise MissingPackage(f"{name} needs gpytorch and linear_operator; install them with: {how_to_install('gp')}.")
