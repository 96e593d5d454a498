"""Kernels of equilibrium networks for gpytorch and linear_operator: Gaussian processes without the
kernel matrix. Needs the extra `gp`."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.errors import InvalidArgument, MissingPackage, how_to_install
from wellposed.kernel._closed_form import is_view_of
from wellposed.kernel._conjugate import check_tolerance, conjugate_gradients, factored_solve
from wellposed.kernel._method import slices
from wellposed.kernel._rows import FeatureKernel, RowKernel, WideFunction, network_rows
from wellposed.kernel.deq_limit import deq_ntk
from wellposed.kernel.wide_limits import check_fraction
from wellposed.nn.activations import ReLU

__all__ = ["KernelOperator", "NetworkKernel", "WideKernel", "solve"]

LinearOperator: Any = object  # without the packages the module can still be imported and read
Kernel: Any = object
_MISSING = any(importlib.util.find_spec(name) is None for name in ("gpytorch", "linear_operator"))
if not _MISSING:
    LinearOperator = importlib.import_module("linear_operator").LinearOperator
    Kernel = importlib.import_module("gpytorch").kernels.Kernel

BLOCK_SIZE = 512
#: Bytes of blocks that an operator keeps for its next product.
MEMORY = 2**30
#: Bytes of a matrix that `solve` forms: 4096 rows in float64.
DENSE = 2**27
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
        _check_installed("KernelOperator")
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
        x2 = self.x1 if self.symmetric and not self.x2.requires_grad else self.x2
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


class NetworkKernel(Kernel):
    """The tangent kernel of a network at its present parameters, for gpytorch.

    The network is not trained: its parameters are no parameters of the kernel. Features of the last
    two batches are kept, until the parameters change.

    Args:
        network: As in `tangent_kernel`, with one output. With `tangent_features`, a product costs
            O(n m^2); without, the gradients (n, p) of all samples are held.
    """

    def __init__(self, network: nn.Module) -> None:
        _check_installed("NetworkKernel")
        super().__init__()
        self._network = (network,)  # in a tuple, so that it is not a sub-module
        self._kept: list[tuple[Tensor, list[Tensor], Tensor, FeatureKernel]] = []

    @property
    def dtype(self) -> torch.dtype:
        return next(self._network[0].parameters()).dtype

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Any:
        operator = self.operator(x1, None if x1 is x2 or torch.equal(x1, x2) else x2)
        return operator.diagonal() if diag else operator

    def operator(self, X: Tensor, X2: Tensor | None = None) -> KernelOperator:
        """The kernel of X (n, ...) with X2 as an operator of linear_operator."""
        features, function = self._features(X)
        features2 = features if X2 is None else self._features(X2)[0]
        return KernelOperator(features, features2, function=function)

    def _features(self, X: Tensor) -> tuple[Tensor, FeatureKernel]:
        network = self._network[0]
        tensors = [*network.parameters(), *network.buffers()]  # their values: a change through .data has no other trace
        for seen, before, features, function in self._kept:
            if all(map(_equal, [seen, *before], [X, *tensors])):
                return features, function
        features, function = network_rows(network, X, "NetworkKernel")
        self._kept = [*self._kept[-1:], (X.detach().clone(), [t.detach().clone() for t in tensors], features, function)]
        return features, function


class WideKernel(Kernel):
    """The kernel of an infinitely wide equilibrium network, for gpytorch.

    `weight_variance` is a parameter, learnt by gradient with the noise. For activations other than
    ReLU, and with layers around the equilibrium, it stays as it is. `readout_variance=0` gives the
    Gram kernel of the equilibria (`population_gram`), the covariance of an untrained network.

    Args:
        weight_variance: s in [0, 1), where training starts; above 0 if it is trained.
        options: `input_variance`, `bias_variance`, `readout_variance`, `activation`, `width`,
            `ntk_parametrization`, `before` and `after` of `deq_ntk`.
    """

    def __init__(self, weight_variance: float = 0.08, **options: Any) -> None:
        _check_installed("WideKernel")
        super().__init__()
        stack = options.get("before") or options.get("after")
        self._trained = isinstance(options.get("activation", ReLU()), ReLU) and not stack
        check_fraction(weight_variance, "WideKernel", "weight_variance")
        if weight_variance == 0 and self._trained:
            raise InvalidArgument("WideKernel: 'weight_variance' must be above 0 where training starts, got 0.")
        if "by_parameter" in options:
            raise InvalidArgument("WideKernel: one kernel is expected, so by_parameter cannot be given. Use deq_ntk.")
        deq_ntk(torch.ones(1, 1, dtype=torch.float64), weight_variance=weight_variance, **options)  # names a wrong option
        self._function = WideFunction(options)
        self.register_parameter("raw_weight_variance", nn.Parameter(torch.zeros(()), requires_grad=self._trained))
        interval = importlib.import_module("gpytorch").constraints.Interval(0.0, 1.0)
        self.register_constraint("raw_weight_variance", interval)
        self.weight_variance = weight_variance

    @property
    def weight_variance(self) -> Tensor:
        return self.raw_weight_variance_constraint.transform(self.raw_weight_variance)

    @weight_variance.setter
    def weight_variance(self, value: float | Tensor) -> None:
        value = torch.as_tensor(value, dtype=self.raw_weight_variance.dtype, device=self.raw_weight_variance.device)
        check_fraction(value.detach(), "WideKernel", "weight_variance")  # as it was rounded
        self.initialize(raw_weight_variance=self.raw_weight_variance_constraint.inverse_transform(value))

    def forward(self, x1: Tensor, x2: Tensor, diag: bool = False, **params: Any) -> Any:
        operator = self.operator(x1, None if x1 is x2 or torch.equal(x1, x2) else x2)
        return operator.diagonal() if diag else operator

    def operator(self, X: Tensor, X2: Tensor | None = None, *, memory: int = MEMORY) -> KernelOperator:
        """The kernel of X (n, d) with X2 as an operator of linear_operator. Its entries, of one set
        of samples half of them, are kept between products if they take at most `memory` bytes."""
        if X.dim() != 2:
            raise InvalidArgument(f"WideKernel: X must be (n, d), one set of samples as rows; got shape {tuple(X.shape)}.")
        s = self.weight_variance.to(X) if self._trained else self.weight_variance.detach().to(X)
        return KernelOperator(X, X if X2 is None else X2, s, function=self._function, memory=memory)


@torch.no_grad()
def solve(
    operator: Any, y: Tensor, *, rtol: float = 1e-10, max_steps: int = 1000, rank: int = 100, dense: int = DENSE
) -> Tensor:
    """operator^(-1) y by preconditioned conjugate gradients, with a residual that is measured.

    The preconditioner is the partial Cholesky factor of linear_operator. Its own conjugate
    gradients (`operator.solve`) take small steps for zero and end near 1e-6 of |y|, whatever
    tolerance is set. A small matrix is formed and factored, which is quicker.

    Args:
        operator: A positive definite `LinearOperator`, as `kernel.operator(X).add_diagonal(noise)`.
        y: (n,) or (n, outputs).
        rtol: |operator a - y| <= rtol |y|, column by column.
        max_steps: Products with the operator; `NotConverged` is raised after them.
        rank: Of the partial Cholesky factor, which takes so many rows of the kernel.
        dense: Bytes up to which the matrix is formed; 0 never forms it.
    """
    _check_installed("solve")
    check_tolerance(rtol, operator.dtype)
    if y.shape[:1] != operator.shape[:1] or y.dtype != operator.dtype or not bool(torch.isfinite(y).all()):
        seen = f"{tuple(y.shape)}, {y.dtype}" + ("" if bool(torch.isfinite(y).all()) else ", with NaN or infinity")
        raise InvalidArgument(f"solve: y must be finite, ({operator.shape[0]}, ...) and {operator.dtype}; got {seen}.")
    b = y.reshape(len(y), -1)
    if len(y) ** 2 * y.element_size() <= dense:
        found = factored_solve(operator.to_dense(), b, rtol=rtol)
        if found is not None:
            return found.reshape(y.shape)
    settings = importlib.import_module("linear_operator").settings
    with settings.max_preconditioner_size(rank), settings.min_preconditioning_size(1):
        precondition = operator._preconditioner()[0] or (lambda r: r)
    if not bool(torch.isfinite(precondition(b)).all()):  # without noise it divides by 0
        precondition = torch.clone
    # the operator itself: blocks that it keeps serve all steps
    return conjugate_gradients(operator._matmul, b, precondition, rtol=rtol, max_steps=max_steps).reshape(y.shape)


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)


def _columns(v: Tensor) -> Tensor:
    """(..., n, q) -> (n, all columns)."""
    return v.movedim(-2, 0).reshape(v.shape[-2], -1)


def _check_installed(name: str) -> None:
    if _MISSING:
        raise MissingPackage(f"{name} needs gpytorch and linear_operator; install them with: {how_to_install('gp')}.")
