"""Products with a tangent kernel that is never formed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.errors import InvalidArgument, InvalidType
from wellposed.kernel._closed_form import ClosedFormMethod, GramBlocks
from wellposed.kernel._generic import GenericMethod, jacobian_product, transposed_jacobian_product
from wellposed.kernel._method import TOTAL, KernelMethod, slices
from wellposed.kernel.empirical import choose_method
from wellposed.nn.tangent import GramProduct


class TangentKernel:
    r"""The tangent kernel as an operator: `TangentKernel(model, X) @ v` without the (n, n) matrix.

    Closed form: (L1 R1^T o L2 R2^T) v = rowsum((L1 (R1^T diag(v) R2)) * L2), O(n k1 k2) per vector,
    no n^2; where forming blocks of the kernel is cheaper (few samples, or many vectors at once)
    that is done, and each is dropped after use. Any other model: J (J'^T v), one vector-Jacobian
    product and one Jacobian-vector product (as the derivative of w -> J^T w, so that what can be
    differentiated twice can be used here).

    The kernel is that of the model's parameters when the operator was made (closed form) or when it
    is used (generic): make a new one after a training step.

    Args:
        model: As in `tangent_kernel`.
        X: (n, ...) inputs, the rows.
        X2: (n2, ...) inputs, the columns; X if not given.
        method: "auto", "closed" or "generic".
        block_size: Samples per block.
        dtype: Of the products; that of the outputs if not given.

    Attributes:
        shape: (n c, n2 c); row i c + k is output k of sample i.
        dtype, device: Of the products.

    Examples:
        >>> import torch, wellposed as wp
        >>> model = wp.GaussianDEQ(4, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        >>> X, v = torch.eye(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
        >>> H = wp.TangentKernel(model, X)
        >>> H.shape, torch.allclose(H @ v, wp.tangent_kernel(model, X) @ v)
        ((4, 4), True)
    """

    def __init__(
        self,
        model: nn.Module,
        X: Tensor,
        X2: Tensor | None = None,
        *,
        method: str = "auto",
        block_size: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._take(choose_method(model, X, X2, method=method, block_size=block_size, dtype=dtype, function="TangentKernel"))

    @classmethod
    def of_method(cls, chosen: KernelMethod) -> TangentKernel:
        """The operator of a chosen that was chosen already; its features are not computed again."""
        kernel = cls.__new__(cls)
        kernel._take(chosen)
        return kernel

    def _take(self, chosen: KernelMethod) -> None:
        self._method = chosen
        self.shape = (chosen.size * chosen.outputs, chosen.size2 * chosen.outputs)
        self.dtype, self.device = chosen.dtype, chosen.device

    def __repr__(self) -> str:
        return f"TangentKernel(shape={self.shape}, dtype={self.dtype})"

    def __matmul__(self, v: Tensor) -> Tensor:
        """(N2,) or (N2, q) -> (N,) or (N, q)."""
        return self._apply(v, transposed=False)

    def transposed_product(self, v: Tensor) -> Tensor:
        """K^T v: (N,) or (N, q) -> (N2,) or (N2, q)."""
        return self._apply(v, transposed=True)

    def diagonal(self) -> Tensor:
        """(N,) the squared norms of the gradients; for the kernel of a batch with itself."""
        if not self._method.symmetric:
            raise InvalidArgument("TangentKernel.diagonal: the kernel between two batches has none. Leave X2 out.")
        with torch.no_grad():
            if isinstance(self._method, ClosedFormMethod):
                left, right = self._method.sides
                total = torch.zeros(self.shape[0], dtype=self.dtype, device=self.device)
                for term in _terms(self._method):
                    product = torch.full_like(total, term.coefficient)
                    for a, b in term.factors:
                        product *= torch.linalg.vecdot(left[a], right[b])
                    total += product
                return total
            assert isinstance(self._method, GenericMethod)
            rows = [
                self._method.jacobian(self._method.X[i : i + 1]).square().sum(2).flatten() for i in range(self._method.size)
            ]
            return torch.cat(rows)

    def as_linear_operator(self) -> Any:
        """The same as a `scipy.sparse.linalg.LinearOperator`, on numpy arrays."""
        from scipy.sparse.linalg import LinearOperator

        def product(transposed: bool) -> Any:
            def apply(v: Any) -> Any:
                given = torch.as_tensor(v.copy(), dtype=self.dtype, device=self.device)
                return self._apply(given.squeeze(1) if v.ndim == 2 and v.shape[1] == 1 else given, transposed).cpu().numpy()

            return apply

        kind = torch.empty(0, dtype=self.dtype).numpy().dtype
        return LinearOperator(
            self.shape,
            matvec=product(False),
            rmatvec=product(True),
            matmat=lambda v: product(False)(v).reshape(self.shape[0], -1),
            dtype=kind,
        )

    def _apply(self, v: Tensor, transposed: bool) -> Tensor:
        size = self.shape[0] if transposed else self.shape[1]
        if not isinstance(v, Tensor):
            raise InvalidType(f"TangentKernel: the vector must be a torch.Tensor, got {type(v).__name__}.")
        if v.dim() not in (1, 2) or v.shape[0] != size:
            raise InvalidArgument(f"TangentKernel: the vector must be ({size},) or ({size}, q), got {tuple(v.shape)}.")
        if v.dtype != self.dtype:
            raise InvalidArgument(f"TangentKernel: the vector must be {self.dtype}, got {v.dtype}. Use v.to({self.dtype}).")
        columns = v.detach().reshape(size, -1)
        if isinstance(self._method, ClosedFormMethod):
            with torch.no_grad():
                left, right = self._method.sides
                terms = _terms(self._method)
                if transposed:
                    # K_ji: the right features of the second batch come first.
                    left, right = right, left
                    terms = [GramProduct(tuple((b, a) for a, b in term.factors), term.coefficient) for term in terms]
                options: Any = {"block_size": self._method.block_size, "symmetric": self._method.symmetric}
                result = closed_product(left, right, terms, columns, **options)
        else:
            assert isinstance(self._method, GenericMethod)
            result = _generic_product(self._method, columns, transposed)
        return result.reshape(-1) if v.dim() == 1 else result


def _terms(chosen: ClosedFormMethod) -> list[GramProduct]:
    return [term for terms in chosen.terms.values() for term in terms]


def closed_product(
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


def _generic_product(chosen: GenericMethod, v: Tensor, transposed: bool) -> Tensor:
    X, X2 = (chosen.X2, chosen.X) if transposed else (chosen.X, chosen.X2)
    parameters = list(chosen.trained.values())
    products = []
    for column in v.mT:
        direction = transposed_jacobian_product(chosen.model, X2, parameters, column)
        products.append(jacobian_product(chosen.model, X, parameters, direction).to(v.dtype))
    return torch.stack(products, dim=1)
