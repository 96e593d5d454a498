"""Monotone convolutions with zero padding: resolvents by a matrix or conjugate gradients."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import conv2d, conv_transpose2d

from wellposed.linalg.direct import inverse_of_positive
from wellposed.nn.maps.operator import AbstractOperator, OperatorCache
from wellposed.nn.monotone._lattice import Lattice, largest_norm_upper, symbol
from wellposed.nn.monotone.conjugate_gradients import conjugate_gradients

#: Of the resolvent, in units of rounding.
RESOLVENT_EPS = 8.0
#: Features up to which I + a(I - W) is inverted as a matrix, once per step size and version of W.
LARGEST_DENSE = 2048


class ZeroPaddedOperator(AbstractOperator):
    r"""The W of `TierWeights` on images padded with zeros; one tier is a single convolution.

        (W z)_i = (1 - m) z_i - A_i^T (A_i z_i + 2 C_(i-1) z_(i-1)) - C_i^T C_i z_i + S_i z_i

    No transform makes it diagonal. Up to `LARGEST_DENSE` features I + a(I - W) is inverted as a
    matrix; beyond, it is solved by conjugate gradients on its normal equations, whose condition
    number is at most ((1 + aL)/(1 + am))^2: some hundred products a resolvent when kernels are
    large. A row that is not solved to rounding is returned as NaN.

    Args:
        A: [(C_i, C_i, k, k)] kernels of the tiers.
        S: [(C_i, C_i, k, k)] skew kernels.
        C: [(C_(i+1), C_i, k, k)] kernels with stride 2 from each tier to the next.
        lattices: Of the tiers.
        margin: m.
        memory: Of the cell.
    """

    def __init__(
        self,
        A: tuple[Tensor, ...],
        S: tuple[Tensor, ...],
        C: tuple[Tensor, ...],
        lattices: tuple[Lattice, ...],
        *,
        margin: float,
        memory: OperatorCache | None = None,
    ) -> None:
        super().__init__((*A, *S, *C), memory)
        self._lattices, self._margin = lattices, margin
        self._sizes = [lattice.features for lattice in lattices]

    def with_tensors(self, *tensors: Tensor) -> ZeroPaddedOperator:
        A, S, C = self._kinds(tensors)
        return ZeroPaddedOperator(A, S, C, self._lattices, margin=self._margin)

    def _kinds(self, tensors: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[Tensor, ...]]:
        tiers = len(self._lattices)
        return tensors[:tiers], tensors[tiers : 2 * tiers], tensors[2 * tiers :]

    def product(self, z: Tensor, out: Tensor | None = None) -> Tensor:
        return self._apply(z, self.plain)

    def tracked(self, z: Tensor) -> Tensor:
        return self._apply(z, self.tensors)

    def _apply(self, z: Tensor, tensors: tuple[Tensor, ...]) -> Tensor:
        A, S, C = self._kinds(tensors)
        parts = self._fields(z)
        down = [_strided(part, kernel) for part, kernel in zip(parts, C, strict=False)]
        fields = []
        for i, part in enumerate(parts):
            inner = _same(part, A[i])
            if i > 0:
                inner = inner + 2 * down[i - 1]
            field = (1 - self._margin) * part - _same_transposed(inner, A[i]) + _same(part, S[i])
            fields.append(field - _strided_transposed(down[i], C[i]) if i < len(C) else field)
        return _joined(fields)

    def transposed(self, p: Tensor, out: Tensor | None = None) -> Tensor:
        A, S, C = self._kinds(self.plain)
        parts = self._fields(p)
        inner = [_same(part, kernel) for part, kernel in zip(parts, A, strict=True)]
        fields = []
        for i, part in enumerate(parts):
            field = (1 - self._margin) * part - _same_transposed(inner[i], A[i]) - _same(part, S[i])
            if i < len(C):
                field = field - _strided_transposed(_strided(part, C[i]) + 2 * inner[i + 1], C[i])
            fields.append(field)
        return _joined(fields)

    def cotangents(self, p: Tensor, z: Tensor, needed: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
        """By autograd of the bilinear form <p, W z>, without transposed convolutions."""
        with torch.enable_grad():
            kernels = tuple(x.detach().requires_grad_() for x in self.plain)
            A, S, C = self._kinds(kernels)
            p_parts, z_parts = self._fields(p.detach()), self._fields(z.detach())
            form = p.new_zeros(())
            for i, (x, y) in enumerate(zip(p_parts, z_parts, strict=True)):
                left = _same(x, A[i])
                right = _same(y, A[i])
                if i > 0:
                    right = right + 2 * _strided(z_parts[i - 1], C[i - 1])
                form = form - (left * right).sum() + (x * _same(y, S[i])).sum()
                if i < len(C):
                    form = form - (_strided(x, C[i]) * _strided(y, C[i])).sum()
            wanted = [kernel for kernel, need in zip(kernels, needed, strict=True) if need]
            gradients = iter(torch.autograd.grad(form, wanted) if wanted else ())
        return tuple(next(gradients) if need else None for need in needed)

    def resolvent(self, v: Tensor, step_size: float, *, transpose: bool = False) -> Tensor:
        if v.shape[1] <= LARGEST_DENSE:
            inverse = self.cached(("inverse", step_size), lambda: self._inverse(v.shape[1], step_size))
            return torch.mm(v, inverse if transpose else inverse.t())
        return self._iterated(v, step_size, transpose)

    def _inverse(self, features: int, a: float) -> Tensor:
        """(I + a(I - W))^(-1)."""
        M = -a * self.cached("dense", lambda: self.dense(features))
        M.diagonal().add_(1 + a)
        return inverse_of_positive(M)

    def _iterated(self, v: Tensor, a: float, transpose: bool) -> Tensor:
        """The resolvent by conjugate gradients; NaN in rows that are not solved."""

        def apply(z: Tensor) -> Tensor:
            return (1 + a) * z - a * self.product(z)

        def apply_transposed(z: Tensor) -> Tensor:
            return (1 + a) * z - a * self.transposed(z)

        forward, backward = (apply_transposed, apply) if transpose else (apply, apply_transposed)
        symmetric = len(self._lattices) == 1 and not bool(self._kinds(self.plain)[1][0].any())
        eps = torch.finfo(v.dtype).eps
        z, solved = conjugate_gradients(
            forward, None if symmetric else backward, v, rtol=RESOLVENT_EPS * eps, floor=16 * (self._terms() + 4) * eps
        )
        return z if bool(solved.all()) else torch.where(solved.unsqueeze(1), z, torch.nan)

    def _terms(self) -> int:
        """Products in the longest sum of a convolution."""
        return max(kernel[0].numel() for kernel in self.plain)

    def monotonicity(self) -> tuple[float, float]:
        """The margin and the norm from those of the kernels on a larger torus, with rounding.

        Padding with zeros is a restriction of the convolution on a torus that is larger by the
        kernel.
        """
        A, S, C = self._kinds(self.plain)
        a = [self._torus_norm(kernel, i) for i, kernel in enumerate(A)]
        s = [self._torus_norm(kernel, i) for i, kernel in enumerate(S)]
        c = [self._torus_norm(kernel, i, strided=True) for i, kernel in enumerate(C)] + [0.0]
        blocks = [self._margin + a[i] ** 2 + c[i] ** 2 + s[i] for i in range(len(A))]
        L = max(blocks) + max((2 * a[i + 1] * c[i] for i in range(len(C))), default=0.0)
        slack = 16 * (self._terms() + 4) * torch.finfo(self.plain[0].dtype).eps * (1 + L)
        return self._margin - slack, L + slack

    def _torus_norm(self, kernel: Tensor, tier: int, *, strided: bool = False) -> float:
        lattice, k = self._lattices[tier], kernel.shape[-1]
        # of the strided one the restriction to every second pixel is no longer than the whole
        p = 2 if strided else 1
        size = tuple(-(-(n + k) // p) for n in (lattice.height, lattice.width))
        return largest_norm_upper(symbol(kernel.double(), (size[0], size[1]), p, strided=strided))

    def _fields(self, z: Tensor) -> list[Tensor]:
        parts = z.split(self._sizes, dim=1)
        return [x.reshape(-1, t.channels, t.height, t.width) for x, t in zip(parts, self._lattices, strict=True)]


def _same(x: Tensor, kernel: Tensor) -> Tensor:
    return conv2d(x, kernel, padding=kernel.shape[-1] // 2)


def _same_transposed(y: Tensor, kernel: Tensor) -> Tensor:
    return conv_transpose2d(y, kernel, padding=kernel.shape[-1] // 2)


def _strided(x: Tensor, kernel: Tensor) -> Tensor:
    return conv2d(x, kernel, stride=2, padding=kernel.shape[-1] // 2)


def _strided_transposed(y: Tensor, kernel: Tensor) -> Tensor:
    # kernel size odd: one row and column more than the shortest preimage
    return conv_transpose2d(y, kernel, stride=2, padding=kernel.shape[-1] // 2, output_padding=1)


def _joined(fields: list[Tensor]) -> Tensor:
    flat = [field.flatten(1) for field in fields]
    return flat[0] if len(flat) == 1 else torch.cat(flat, dim=1)
