"""Products with a tangent kernel that is never formed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from wellposed.errors import InvalidArgument, InvalidType
from wellposed.kernel._method import KernelMethod
from wellposed.kernel.empirical import choose_method


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
            return self._method.diagonal()

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
        with torch.no_grad():
            result = self._method.product(v.detach().reshape(size, -1), transposed=transposed)
        return result.reshape(-1) if v.dim() == 1 else result
