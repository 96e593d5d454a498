"""z -> activation(W z + c) for a batch of c: a dense layer as a map that knows everything about itself."""

from __future__ import annotations

import torch
from torch import Tensor

from wellposed.implicit import AbstractPullback, AbstractStructuredMap
from wellposed.linalg import AbstractJacobian, least_eigenvalue_lower, spectral_norm_upper
from wellposed.nn.activations import AbstractActivation
from wellposed.solve import AbstractSplitMap

__all__ = ["DenseMap"]


class DenseMap(AbstractStructuredMap, AbstractSplitMap):
    r"""f(z) = s(W z + c), with rows for samples: Z -> s(Z W^T + C).

    One matrix product an evaluation, in place; adjoints and cotangents by formula. With D = diag(s'(W z + c)) the system
    (I - J)^T u = v, J = D W, is solved for p = D u:

        p = D (v + W^T p),      dL/dc = p,      dL/dW = sum_i p_i z_i^T

    the masked adjoint of [ling2022, Lemma 2] and [nguyen2022, Lemma 3.2.2]; it vanishes where a unit is inactive.

    Args:
        W: (m, m).
        c: (batch, m) what the input contributes.
        activation: s.
    """

    writes_out = True

    def __init__(self, W: Tensor, c: Tensor, activation: AbstractActivation) -> None:
        self._W, self._c, self._s = W, c, activation
        self._W_plain, self._c_plain = W.detach(), c.detach()
        self._factors: dict[float, tuple[Tensor, Tensor]] = {}

    def __call__(self, z: Tensor, out: Tensor | None = None) -> Tensor:
        return self._s.apply_(self.affine(z, out=out))

    def at_zero(self) -> Tensor:
        """f(0) = s(c), which needs no product."""
        return self._s(self._c_plain)

    def tracked(self, z: Tensor) -> Tensor:
        return self._s(torch.addmm(self._c, z, self._W.t()))

    def take(self, rows: Tensor) -> DenseMap:
        part = DenseMap(self._W_plain, self._c_plain[rows], self._s)
        part._factors = self._factors
        return part

    def jacobian(self, z: Tensor) -> AbstractJacobian:
        return _DenseJacobian(self._W_plain, self._s.slope(self(z)), z)

    # AbstractStructuredMap

    def inputs(self) -> tuple[Tensor, ...]:
        return self._W, self._c

    def with_inputs(self, *inputs: Tensor) -> DenseMap:
        W, c = inputs
        return DenseMap(W, c, self._s)

    def pullback(self, fz: Tensor) -> AbstractPullback:
        return _DensePullback(self._W_plain, self._s.slope(fz))

    def cotangents(self, u: Tensor, z: Tensor, needed: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
        return u.t() @ z if needed[0] else None, u if needed[1] else None

    # AbstractSplitMap

    def affine(self, z: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.addmm(self._c_plain, z, self._W_plain.t(), out=out)

    def resolvent(self, v: Tensor, step_size: float) -> Tensor:
        if step_size not in self._factors:
            W = self._W_plain
            identity = torch.eye(W.shape[0], dtype=W.dtype, device=W.device)
            self._factors[step_size] = torch.linalg.lu_factor(identity + step_size * (identity - W))
        factor, pivots = self._factors[step_size]
        return torch.linalg.lu_solve(factor, pivots, torch.add(v, self._c_plain, alpha=step_size).t()).t().contiguous()

    def prox(self, v: Tensor, step_size: float) -> Tensor:
        return self._s.prox(v, step_size)

    def monotonicity(self) -> tuple[float, float]:
        W = self._W_plain.double()
        F = torch.eye(W.shape[0], dtype=W.dtype, device=W.device) - W
        return least_eigenvalue_lower((F + F.t()) / 2), spectral_norm_upper(F)


class _DensePullback(AbstractPullback):
    """p = D (v + W^T p), in rows: P = D o (V + P W)."""

    writes_out = True

    def __init__(self, W: Tensor, slope: Tensor | None) -> None:
        self._W, self._slope = W, slope

    def rhs(self, v: Tensor) -> Tensor:
        return v.clone() if self._slope is None else v * self._slope

    def affine(self, u: Tensor, rhs: Tensor, out: Tensor | None = None) -> Tensor:
        product = torch.mm(u, self._W, out=out)
        return product.add_(rhs) if self._slope is None else torch.addcmul(rhs, product, self._slope, out=product)

    def product(self, u: Tensor) -> Tensor:
        product = torch.mm(u, self._W)
        return product if self._slope is None else product.mul_(self._slope)

    def take(self, rows: Tensor) -> AbstractPullback:
        return _DensePullback(self._W, None if self._slope is None else self._slope[rows])


class _DenseJacobian(AbstractJacobian):
    """J = D W."""

    setup = 1

    def __init__(self, W: Tensor, slope: Tensor | None, at: Tensor) -> None:
        self._W, self._slope, self._at = W, slope, at

    @property
    def at(self) -> Tensor:
        return self._at

    def mv(self, u: Tensor) -> Tensor:
        product = torch.mm(u, self._W.t())
        return product if self._slope is None else product.mul_(self._slope)

    def rmv(self, u: Tensor) -> Tensor:
        return torch.mm(u if self._slope is None else u * self._slope, self._W)
