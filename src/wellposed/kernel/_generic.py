"""The generic method: the kernel of any model, from blocks of rows of its Jacobian.

K_ij = <df_i/dtheta, df_j/dtheta>. A gradient is taken sample by sample (a batch of one, so that the
implicit adjoint of an equilibrium is solved for that sample only), and held as a row of a block;
the whole (n c, p) Jacobian never exists unless it fits into the budget. Rows that do not fit are
computed again, once for each held block before them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from wellposed._memory import available_memory
from wellposed.errors import InvalidArgument
from wellposed.kernel._kernel_memory import KernelMemory
from wellposed.kernel._method import TOTAL, Block, Done, KernelLayout, KernelMethod, slices, trained_parameters
from wellposed.kernel._outputs import outputs_of
from wellposed.nn.tangent import GramProduct

#: Bytes of Jacobian rows held at once, unless something else is asked for.
DEFAULT_BUDGET = 2 * 1024**3
#: The held block gets this many times the memory of the rows that stream past it.
HELD_TO_STREAMED = 8
#: Rows and columns of the products handed out.
TILE = 512
#: Samples whose graph is held at once.
ROWS = 512


class GenericMethod(KernelMethod):
    """The kernel of any `nn.Module` that maps (n, ...) to (n,) or (n, c), row by row.

    Args:
        model: In the mode (train or eval) that it is in.
        X, X2: (n, ...) and (n2, ...) inputs; X2 None means X.
        memory: Bytes that the computation may take; decides how many rows of the Jacobian are held.
        block_size: Samples whose rows are held, instead.
        dtype: Of the Jacobian and the kernel; that of the output if not given.
    """

    def __init__(
        self,
        model: nn.Module,
        X: Tensor,
        X2: Tensor | None = None,
        *,
        memory: int | None = None,
        block_size: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.model, self.X, self.X2 = model, X, X if X2 is None else X2
        self.symmetric = X2 is None
        self.size, self.size2 = X.shape[0], self.X2.shape[0]
        self.trained = trained_parameters(model)
        if not self.trained:
            raise InvalidArgument("tangent_kernel: no parameter of the model requires a gradient, so there is no kernel.")
        self.parameters = tuple(self.trained)
        output = outputs_of(model, X)
        self.vector_output = output.dim() == 1
        self.outputs = 1 if self.vector_output else output.shape[1]
        self.dtype, self.device = dtype or output.dtype, output.device
        self.columns = sum(parameter.numel() for parameter in self.trained.values())
        self._memory, self._block_size = memory, block_size
        self.advice = "Allow more with memory=, give a smaller block_size=, or use TangentKernel for products only."

    def memory(self, layout: KernelLayout) -> KernelMemory:
        held, streamed = self._split(layout)
        kernel = self.kernel_bytes(layout)
        in_memory, disk = (kernel, 0) if layout.in_memory else (0, kernel)
        tile = (min(TILE, self.size * self.outputs) * min(TILE, self.size2 * self.outputs)) * self.dtype.itemsize
        parts = len(self.parameters) if layout.by_parameter else 1
        return KernelMemory(
            in_memory, (held + streamed) * self._bytes_per_sample(), (parts + 2) * tile, 2 * self._bytes_per_sample(), disk
        )

    def blocks(self, layout: KernelLayout, done: Done | None = None) -> Iterator[Block]:
        held, streamed = self._split(layout)
        tile = max(1, TILE // self.outputs)
        H = torch.empty(held, self.outputs, self.columns, dtype=self.dtype, device=self.device)
        S = torch.empty(streamed, self.outputs, self.columns, dtype=self.dtype, device=self.device)
        # The held rows are columns of the kernel: what streams past lies below them.
        for columns in slices(self.size2, held):
            J2 = self.jacobian(self.X2[columns], out=H)
            if self.symmetric:
                for rows in slices(J2.shape[0], tile):
                    for before in slices(rows.stop, tile):
                        yield self._product(J2, J2, rows, before, columns.start, columns.start, layout)
            for some in slices(self.size, streamed) if streamed else ():
                if self.symmetric:
                    some = slice(some.start + columns.stop, min(some.stop + columns.stop, self.size))
                    if some.start >= some.stop:
                        break
                J = self.jacobian(self.X[some], out=S)
                for rows in slices(J.shape[0], tile):
                    for part in slices(J2.shape[0], tile):
                        yield self._product(J, J2, rows, part, some.start, columns.start, layout)

    def jacobian(self, X: Tensor, *, out: Tensor | None = None) -> Tensor:
        """(r, c, p) gradients of the outputs of each sample, parameters side by side."""
        if out is None:
            out = torch.empty(X.shape[0], self.outputs, self.columns, dtype=self.dtype, device=self.device)
        parameters = list(self.trained.values())
        for row in range(X.shape[0]):
            with torch.enable_grad():
                y = self.model(X[row : row + 1]).reshape(self.outputs)
                singles = y.unbind()
            for k, single in enumerate(singles):
                grads: Sequence[Tensor | None] = [None] * len(parameters)
                if single.requires_grad:
                    more = k + 1 < self.outputs
                    grads = torch.autograd.grad(single, parameters, retain_graph=more, allow_unused=True)
                start = 0
                for parameter, grad in zip(parameters, grads, strict=True):
                    place = out[row, k, start : start + parameter.numel()]
                    start += parameter.numel()
                    if grad is None:
                        place.zero_()
                    else:
                        place.copy_(grad.reshape(-1))
        return out[: X.shape[0]]

    def product(self, v: Tensor, *, transposed: bool) -> Tensor:
        X, X2 = (self.X2, self.X) if transposed else (self.X, self.X2)
        parameters = list(self.trained.values())
        products = []
        for column in v.mT:
            direction = transposed_jacobian_product(self.model, X2, parameters, column)
            products.append(jacobian_product(self.model, X, parameters, direction).to(v.dtype))
        return torch.stack(products, dim=1)

    def diagonal(self) -> Tensor:
        return torch.cat([self.jacobian(self.X[i : i + 1]).square().sum(2).flatten() for i in range(self.size)])

    def gram_terms(self) -> tuple[dict[str, Tensor], list[GramProduct]]:
        return {"J": self.jacobian(self.X).squeeze(1)}, [GramProduct((("J", "J"),))]

    def rounding_upper(self, trace: float) -> float:
        """gamma_p/(1 - gamma_p) tr(K): an entry is off by at most gamma_p ||J_i|| ||J_j||, in all
        gamma_p ||J||_F^2.

        The exact trace ||J||_F^2 is at most the computed one over 1 - gamma_p. Underflow takes at
        most the least normal number from each product of entries.
        """
        depth, unit = self.columns + 2, torch.finfo(self.dtype).eps / 2
        gamma = depth * unit / (1.0 - depth * unit)
        underflow = 2.0 * depth * torch.finfo(self.dtype).smallest_normal * self.size * self.outputs
        return gamma / (1.0 - gamma) * trace * (1.0 + 2.0**-20) + underflow

    def _product(self, J: Tensor, J2: Tensor, rows: slice, columns: slice, top: int, left: int, layout: KernelLayout) -> Block:
        """J[rows] J2[columns]^T, by parameter and by output as asked; `top`, `left` say where the
        two blocks stand."""
        A, B = J[rows], J2[columns]
        if layout.per_output:
            A, B, scale = A.transpose(0, 1), B.transpose(0, 1), 1
        else:
            A, B, scale = A.reshape(1, -1, self.columns), B.reshape(1, -1, self.columns), self.outputs
        place = [
            slice(scale * (start + part.start), scale * (start + part.stop)) for start, part in ((top, rows), (left, columns))
        ]
        if not layout.by_parameter:
            return Block(place[0], place[1], {TOTAL: A @ B.mT})
        parts, start = {}, 0
        for name, parameter in self.trained.items():
            span = slice(start, start + parameter.numel())
            start = span.stop
            parts[name] = A[..., span] @ B[..., span].mT
        return Block(place[0], place[1], parts)

    def _bytes_per_sample(self) -> int:
        return self.outputs * self.columns * self.dtype.itemsize

    def _split(self, layout: KernelLayout) -> tuple[int, int]:
        """How many samples are held, and how many stream past at once (0 if nothing is left to
        stream)."""
        per_sample = self._bytes_per_sample()
        if self._block_size is not None:
            held = self._block_size
        else:
            kernel = self.kernel_bytes(layout) if layout.in_memory else 0
            if self._memory is not None:
                budget = self._memory - kernel - 3 * TILE**2 * self.dtype.itemsize - 2 * per_sample
            else:
                available = available_memory(self.device)
                budget = DEFAULT_BUDGET if available is None else min(DEFAULT_BUDGET, (available - kernel) // 2)
            held = budget * HELD_TO_STREAMED // (HELD_TO_STREAMED + 1) // per_sample
            if self.symmetric and budget // per_sample >= self.size:
                held = self.size
        held = max(1, min(held, self.size2))
        if self.symmetric and held == self.size:
            return held, 0
        return held, max(1, min(held // HELD_TO_STREAMED, self.size))


def transposed_jacobian_product(model: nn.Module, X: Tensor, parameters: list[nn.Parameter], v: Tensor) -> list[Tensor]:
    """J^T v, one tensor per parameter, for v of length n c."""
    total = [torch.zeros_like(parameter) for parameter in parameters]
    outputs = v.shape[0] // X.shape[0]
    for rows in slices(X.shape[0], ROWS):
        with torch.enable_grad():
            y = model(X[rows]).reshape(-1)
        cotangent = v[rows.start * outputs : rows.stop * outputs].to(y.dtype)
        if y.requires_grad:
            for sum_, grad in zip(total, torch.autograd.grad(y, parameters, cotangent, allow_unused=True), strict=True):
                if grad is not None:
                    sum_ += grad
    return total


def jacobian_product(model: nn.Module, X: Tensor, parameters: list[nn.Parameter], direction: list[Tensor]) -> Tensor:
    """J u, of length n c, as the derivative of w -> <J^T w, u>, which is linear in w."""
    parts = []
    for rows in slices(X.shape[0], ROWS):
        with torch.enable_grad():
            y = model(X[rows]).reshape(-1)
            product = torch.zeros_like(y)
            if y.requires_grad:
                w = torch.zeros_like(y, requires_grad=True)
                grads = torch.autograd.grad(y, parameters, w, create_graph=True, allow_unused=True)
                used = [(grad, u) for grad, u in zip(grads, direction, strict=True) if grad is not None and grad.requires_grad]
                if used:
                    (product,) = torch.autograd.grad([grad for grad, _ in used], w, [u for _, u in used])
        parts.append(product.detach())
    return torch.cat(parts)
