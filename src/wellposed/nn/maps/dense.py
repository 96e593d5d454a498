"""z -> activation(W z + c) for a batch of c: a dense layer as a map that knows everything about itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wellposed.errors import InvalidArgument
from wellposed.linalg import least_eigenvalue_lower, spectral_norm_upper
from wellposed.nn._positive import inverse_of_positive
from wellposed.nn.activations import AbstractActivation
from wellposed.nn.maps.affine import OperatorMap
from wellposed.nn.maps.operator import AbstractOperator, Memory

__all__ = ["DenseMap", "DenseOperator", "MonotoneOperator"]


class DenseOperator(AbstractOperator):
    """A matrix W: one product in place, and the LU factors of I + a(I - W) once per step size and version of W.

    At 1000 units and 128 samples a solve with the factors takes as long as a product, and they cost a third of an inverse.
    """

    writes_out = True

    def __init__(self, W: Tensor, memory: Memory | None = None) -> None:
        super().__init__((W,), memory)
        self._W = self.plain[0]

    def with_tensors(self, *tensors: Tensor) -> DenseOperator:
        (W,) = tensors
        return DenseOperator(W)

    def product(self, z: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.mm(z, self._W.t(), out=out)

    def transposed(self, p: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.mm(p, self._W, out=out)

    def affine(self, z: Tensor, c: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.addmm(c, z, self._W.t(), out=out)

    def tracked(self, z: Tensor) -> Tensor:
        return z @ self.tensors[0].t()

    def cotangents(self, p: Tensor, z: Tensor, needed: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
        return (p.t() @ z if needed[0] else None,)

    def resolvent(self, v: Tensor, step_size: float, *, transpose: bool = False) -> Tensor:
        factor, pivots = self.recall(("LU", step_size), lambda: self._factor(step_size))
        # rows of v are columns for LAPACK: neither transpose copies
        return torch.linalg.lu_solve(factor, pivots, v.t(), adjoint=transpose).t()

    def _factor(self, a: float) -> tuple[Tensor, Tensor]:
        factor, pivots, info = torch.linalg.lu_factor_ex(self._shifted(a))
        if int(info) > 0:
            raise InvalidArgument(
                f"I + a(I - W) is singular for the step size a = {a:.3g}, so there is no resolvent: I - W is not monotone. "
                "Take weight=Monotone(margin) in the cell, or a solver that needs none, such as Auto() or NewtonKrylov()."
            )
        return factor, pivots

    def _shifted(self, a: float) -> Tensor:
        """I + a(I - W)."""
        M = -a * self._W
        M.diagonal().add_(1 + a)
        return M

    def monotonicity(self) -> tuple[float, float]:
        W = self._W.double()
        F = torch.eye(W.shape[0], dtype=W.dtype, device=W.device) - W
        return least_eigenvalue_lower((F + F.t()) / 2), spectral_norm_upper(F)


class MonotoneOperator(DenseOperator):
    r"""W = (1 - m) I - A^T A + B - B^T, known by its A and B.

    W is formed once per version of them, without a graph, and so is the inverse of I + a(I - W): with a forward and an adjoint
    solve of some ten steps each, products with it are cheaper than solves with LU factors. Cotangents never see an m x m x m
    product: with rows p, z of a
    batch and G = sum p z^T,

        dA = -A (G + G^T) = -((A p)^T z + (A z)^T p),      dB = G - G^T                    [nguyen2022, Lemma 3.2.1]

    Args:
        A: (k, m). B: (m, m). margin: m.
        memory: Of the cell.
    """

    def __init__(self, A: Tensor, B: Tensor, margin: float, memory: Memory | None = None) -> None:
        AbstractOperator.__init__(self, (A, B), memory)
        self._margin = margin
        self._W = self.recall("W", self._form)

    def recall(self, key: Any, make: Callable[[], Any]) -> Any:
        return super().recall((key, self._margin), make)  # W depends on it as well as on the tensors

    def _form(self) -> Tensor:
        """As `Monotone` does it, in place: three passes over a matrix and one product."""
        A, B = self.plain
        W = torch.sub(B, B.t()).addmm_(A.t(), A, alpha=-1)
        W.diagonal().add_(1 - self._margin)
        return W

    def resolvent(self, v: Tensor, step_size: float, *, transpose: bool = False) -> Tensor:
        inverse = self.recall(("inverse", step_size), lambda: inverse_of_positive(self._shifted(step_size)))
        return torch.mm(v, inverse if transpose else inverse.t())

    def with_tensors(self, *tensors: Tensor) -> MonotoneOperator:
        A, B = tensors
        return MonotoneOperator(A, B, self._margin)

    def tracked(self, z: Tensor) -> Tensor:
        A, B = self.tensors
        return (1 - self._margin) * z - (z @ A.t()) @ A + z @ (B.t() - B)

    def cotangents(self, p: Tensor, z: Tensor, needed: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
        A = self.plain[0]
        dA = dB = None
        if needed[0]:
            # in place: new memory of m x m costs as much as a product of the batch
            dA = ((p @ A.t()).t() @ z).addmm_((z @ A.t()).t(), p).neg_()
        if needed[1]:
            G = p.t() @ z
            dB = G - G.t()
        return dA, dB


class DenseMap(OperatorMap):
    r"""f(z) = s(W z + c), with rows for samples: Z -> s(Z W^T + C). See `OperatorMap`.

    Args:
        W: (m, m).
        c: (batch, m) what the input contributes.
        activation: s.
        memory: Where factorizations of W are kept; a new one if not given.
    """

    def __init__(self, W: Tensor, c: Tensor, activation: AbstractActivation, memory: Memory | None = None) -> None:
        super().__init__(DenseOperator(W, memory), c, activation)

    def tracked(self, z: Tensor) -> Tensor:
        return self._s(torch.addmm(self._c, z, self.operator.tensors[0].t()))
