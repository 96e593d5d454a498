"""The linear system behind an exact gradient."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wellposed.errors import WellposedError
from wellposed.linalg.jacobian import AbstractJacobian, ProductJacobian
from wellposed.solve._samples import differs
from wellposed.solve.map import AbstractMap, RowsCoupled
from wellposed.solve.solution import Solution


class AbstractPullback(abc.ABC):
    """A system u = rhs(v) + A u, whose solution carries the cotangent v through the equilibrium."""

    #: Whether `affine` uses `out=`.
    writes_out: bool = False
    #: See `AbstractMap`.
    idle_part: float = 0.0
    cost: tuple[float, int] | None = None

    @property
    def built_in(self) -> bool:
        """Whether the system is known to be row-wise; see `AbstractMap.built_in`."""
        return False

    def rhs(self, v: Tensor) -> Tensor:
        """The right-hand side of the cotangent v of z*; v itself unless overridden."""
        return v

    def affine(self, u: Tensor, rhs: Tensor, out: Tensor | None = None) -> Tensor:
        """rhs + A u, row by row; may write into `out`."""
        return self.product(u) + rhs

    @abc.abstractmethod
    def product(self, u: Tensor) -> Tensor:
        """A u."""

    @abc.abstractmethod
    def take(self, rows: Tensor) -> AbstractPullback:
        """The same for some of the rows."""

    def jacobian(self, u: Tensor) -> AbstractJacobian:
        """A, which no solver needs transposed."""
        return ProductJacobian(u, self.product, _no_transpose)

    def as_map(self, rhs: Tensor, v: Tensor) -> AbstractMap:
        """u -> rhs + A u for a solver of fixed points, given rhs = rhs(v)."""
        return AdjointMap(self, rhs)


class JacobianPullback(AbstractPullback):
    """(I - J)^T u = v for any map: A = J^T at the equilibrium z."""

    idle_part = 0.5  # some rows are recorded anew

    def __init__(self, f: AbstractMap, z: Tensor, jacobian: AbstractJacobian | None = None) -> None:
        self._f, self._z = f, z
        self._jacobian = f.jacobian(z) if jacobian is None else jacobian
        self.cost = None if f.cost is None else (2 * f.cost[0], f.cost[1])  # about two operations for each of f

    @property
    def built_in(self) -> bool:
        return self._f.built_in

    def product(self, u: Tensor) -> Tensor:
        return self._jacobian.rmv(u)

    def take(self, rows: Tensor) -> AbstractPullback:
        part = self._f.take(rows)
        jacobian = part.jacobian(self._z[rows])
        whole, alone = self._jacobian.value, jacobian.value
        if whole is not None and alone is not None and bool(differs(alone, whole[rows]).any()):
            # f can only be evaluated for the whole batch, and so can its Jacobian
            return _StandingPullback(self, self._z.shape[0], rows)
        return JacobianPullback(part, self._z[rows], jacobian)


class _StandingPullback(AbstractPullback):
    """Some rows of a system with products of the whole batch only; u = 0 in the other rows.

    Their products are then 0 too, unless they depend on these rows: `RowsCoupled` is raised in that
    case.
    """

    def __init__(self, whole: JacobianPullback, batch: int, rows: Tensor) -> None:
        self._whole, self._batch, self._rows = whole, batch, rows
        self._idle = torch.ones(batch, dtype=torch.bool, device=rows.device)
        self._idle[rows] = False

    def product(self, u: Tensor) -> Tensor:
        whole = self._whole.product(u.new_zeros(self._batch, u.shape[1]).index_copy_(0, self._rows, u))
        if bool(whole[self._idle].nan_to_num(0.0, 0.0, 0.0).any()):  # 0 times an infinite slope is NaN: not a dependence
            raise RowsCoupled
        return whole[self._rows]

    def take(self, rows: Tensor) -> AbstractPullback:
        return _StandingPullback(self._whole, self._batch, self._rows[rows])


class WholePullback(AbstractPullback):
    """The system of a batch whose rows depend on each other, as that of one row."""

    def __init__(self, inner: AbstractPullback, shape: torch.Size) -> None:
        self._inner, self._shape = inner, shape

    def rhs(self, v: Tensor) -> Tensor:
        return self._inner.rhs(v.reshape(self._shape)).reshape(1, -1)

    def affine(self, u: Tensor, rhs: Tensor, out: Tensor | None = None) -> Tensor:
        return self._inner.affine(u.reshape(self._shape), rhs.reshape(self._shape)).reshape(1, -1)

    def product(self, u: Tensor) -> Tensor:
        return self._inner.product(u.reshape(self._shape)).reshape(1, -1)

    def take(self, rows: Tensor) -> AbstractPullback:
        return self  # there is only one row


class AbstractStructuredMap(AbstractMap):
    """A map of given tensors, with formulas for their cotangents.

    A first derivative then needs no recorded evaluation of f. Higher derivatives use `tracked`.
    """

    def at_zero(self) -> Tensor | None:
        """f(0), if it is known without an evaluation."""
        return None

    @abc.abstractmethod
    def pullback(self, fz: Tensor) -> AbstractPullback:
        """The adjoint system at an equilibrium, given f(z) there."""

    @abc.abstractmethod
    def cotangents(self, u: Tensor, z: Tensor, needed: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
        """The cotangent of each of `inputs`, given the adjoint u at z; None if not needed."""


@dataclass(frozen=True)
class Linearised:
    """An equilibrium with its adjoint.

    Attributes:
        f: The map (an `AbstractStructuredMap`), without a graph.
        value: (batch, features) z.
        image: (batch, features) f(z).
        adjoint: (batch, features) the solution of its adjoint system (for `DenseMap` masked).
        solution, adjoint_solution: Of the two solves.
    """

    f: Any
    value: Tensor
    image: Tensor
    adjoint: Tensor
    solution: Solution
    adjoint_solution: Solution


class AdjointMap(AbstractMap):
    """u -> rhs + A u as a fixed-point map: the loop of `solve` serves backward passes too."""

    leaves_at_once = False
    strides = repeats = True  # products with one recorded graph

    def __init__(self, pullback: AbstractPullback, rhs: Tensor) -> None:
        self._pullback, self._rhs = pullback, rhs
        self.writes_out, self.idle_part, self.cost = pullback.writes_out, pullback.idle_part, pullback.cost

    @property
    def built_in(self) -> bool:
        return self._pullback.built_in

    def __call__(self, z: Tensor, out: Tensor | None = None) -> Tensor:
        return self._pullback.affine(z, self._rhs, out=out)

    def take(self, rows: Tensor) -> AbstractMap:
        return AdjointMap(self._pullback.take(rows), self._rhs.index_select(0, rows))

    def jacobian(self, z: Tensor) -> AbstractJacobian:
        return self._pullback.jacobian(z)


def _no_transpose(u: Tensor) -> Tensor:
    raise NotImplementedError("no solver needs the transpose of an adjoint system")


def check_same_map(now: Tensor | None, fz: Tensor) -> None:
    """Raises if f(z) has changed since the forward pass."""
    if now is None:
        return
    if torch.equal(now, fz):  # the usual case
        return
    finite = torch.where(fz.isfinite(), fz, 0.0)  # the rest of a row with a NaN still counts
    scale = finite.abs().amax(dim=1, keepdim=True) if fz.shape[1] else fz
    same = (now - fz).abs() <= 1e3 * torch.finfo(fz.dtype).eps * scale
    if not bool((same | ~fz.isfinite()).all()):
        raise WellposedError(
            "backward of the equilibrium: f gives another value at the equilibrium than it did in the forward pass. A "
            "parameter was changed in place between forward and backward (call backward before optimizer.step()), or f "
            "is random (make noise such as dropout constant within a solve)."
        )
