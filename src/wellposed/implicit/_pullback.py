"""The linear system behind an exact gradient, in the form that is cheapest for the map at hand."""

from __future__ import annotations

import abc

import torch
from torch import Tensor

from wellposed.linalg import AbstractJacobian
from wellposed.solve import AbstractMap
from wellposed.solve._map import RowsCoupled, differs

__all__ = ["AbstractPullback", "AbstractStructuredMap", "AdjointMap", "JacobianPullback", "WholePullback"]


class AbstractPullback(abc.ABC):
    """A system u = rhs(v) + A u, whose solution carries the cotangent v through the equilibrium."""

    #: Whether `affine` uses `out=`.
    writes_out: bool = False

    @property
    def built_in(self) -> bool:
        """Whether the system is known to be row-wise; see `AbstractMap.built_in`."""
        return False

    @abc.abstractmethod
    def rhs(self, v: Tensor) -> Tensor:
        """The right-hand side that the cotangent v of z* gives."""

    @abc.abstractmethod
    def affine(self, u: Tensor, rhs: Tensor, out: Tensor | None = None) -> Tensor:
        """rhs + A u, row by row; may write into `out`."""

    @abc.abstractmethod
    def product(self, u: Tensor) -> Tensor:
        """A u."""

    @abc.abstractmethod
    def take(self, rows: Tensor) -> AbstractPullback:
        """The same for some of the rows."""

    def as_map(self, rhs: Tensor, v: Tensor) -> AdjointMap:
        """u -> rhs + A u for a solver of fixed points, given rhs = rhs(v); a structured one may know more of itself."""
        return AdjointMap(self, rhs)


class JacobianPullback(AbstractPullback):
    """(I - J)^T u = v for any map: A = J^T at the equilibrium z."""

    def __init__(self, f: AbstractMap, z: Tensor, jacobian: AbstractJacobian | None = None) -> None:
        self._f, self._z = f, z
        self._jacobian = f.jacobian(z) if jacobian is None else jacobian

    @property
    def built_in(self) -> bool:
        return self._f.built_in

    def rhs(self, v: Tensor) -> Tensor:
        return v

    def affine(self, u: Tensor, rhs: Tensor, out: Tensor | None = None) -> Tensor:
        return self.product(u) + rhs

    def product(self, u: Tensor) -> Tensor:
        return self._jacobian.rmv(u)

    def take(self, rows: Tensor) -> AbstractPullback:
        part = self._f.take(rows)
        jacobian = part.jacobian(self._z[rows])
        whole, alone = getattr(self._jacobian, "value", None), getattr(jacobian, "value", None)
        if whole is not None and alone is not None and bool(differs(alone, whole[rows]).any()):
            # f can only be evaluated for the whole batch, and so can its Jacobian
            return _StandingPullback(self, self._z.shape[0], rows)
        return JacobianPullback(part, self._z[rows], jacobian)


class _StandingPullback(AbstractPullback):
    """Some rows of a system whose products can only be formed for the whole batch; u = 0 in the other rows.

    Their products are then 0 too, unless they depend on these rows: `RowsCoupled` is raised in that case.
    """

    def __init__(self, whole: JacobianPullback, batch: int, rows: Tensor) -> None:
        self._whole, self._batch, self._rows = whole, batch, rows
        self._idle = torch.ones(batch, dtype=torch.bool, device=rows.device)
        self._idle[rows] = False

    def rhs(self, v: Tensor) -> Tensor:
        return v

    def affine(self, u: Tensor, rhs: Tensor, out: Tensor | None = None) -> Tensor:
        return self.product(u) + rhs

    def product(self, u: Tensor) -> Tensor:
        whole = self._whole.product(u.new_zeros(self._batch, u.shape[1]).index_copy_(0, self._rows, u))
        if bool(whole[self._idle].nan_to_num(0.0, 0.0, 0.0).any()):  # 0 times an infinite slope is NaN, and no dependence
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
    """A map that knows its own derivatives: it depends on given tensors, and carries cotangents to them by formula.

    A first derivative then costs no recorded evaluation of f at all. Higher derivatives go the general way, through `tracked`.
    """

    def at_zero(self) -> Tensor | None:
        """f(0), if it is known without an evaluation."""
        return None

    @abc.abstractmethod
    def pullback(self, fz: Tensor) -> AbstractPullback:
        """The adjoint system at an equilibrium, given f(z) there."""

    @abc.abstractmethod
    def cotangents(self, u: Tensor, z: Tensor, needed: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
        """What the solution u of the adjoint system at z means for each of `inputs`; None where not needed."""


class AdjointMap(AbstractMap):
    """u -> rhs + A u as a fixed-point map, so that the loop of `solve` serves backward passes too."""

    steady = True

    def __init__(self, pullback: AbstractPullback, rhs: Tensor) -> None:
        self._pullback, self._rhs = pullback, rhs
        self.writes_out = pullback.writes_out

    @property
    def built_in(self) -> bool:
        return self._pullback.built_in

    @property
    def leaves_at_once(self) -> bool:
        return False  # taking rows records f anew, which costs more than a product

    def __call__(self, z: Tensor, out: Tensor | None = None) -> Tensor:
        return self._pullback.affine(z, self._rhs, out=out)

    def take(self, rows: Tensor) -> AbstractMap:
        return AdjointMap(self._pullback.take(rows), self._rhs.index_select(0, rows))

    def jacobian(self, z: Tensor) -> AbstractJacobian:
        return _Constant(self._pullback, z)


class _Constant(AbstractJacobian):
    """The Jacobian of an affine map: the same everywhere, and free."""

    def __init__(self, pullback: AbstractPullback, at: Tensor) -> None:
        self._pullback, self._at = pullback, at

    @property
    def at(self) -> Tensor:
        return self._at

    def mv(self, u: Tensor) -> Tensor:
        return self._pullback.product(u)

    def rmv(self, u: Tensor) -> Tensor:
        raise NotImplementedError("the transpose of an adjoint system is not needed by any solver")
