"""The linear system behind an exact gradient, in the form that is cheapest for the map at hand."""

from __future__ import annotations

import abc

from torch import Tensor

from wellposed.linalg import AbstractJacobian
from wellposed.solve import AbstractMap

__all__ = ["AbstractPullback", "AbstractStructuredMap", "AdjointMap", "JacobianPullback"]


class AbstractPullback(abc.ABC):
    """A system u = rhs(v) + A u, whose solution carries the cotangent v through the equilibrium."""

    #: Whether `affine` uses `out=`.
    writes_out: bool = False

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

    def rhs(self, v: Tensor) -> Tensor:
        return v

    def affine(self, u: Tensor, rhs: Tensor, out: Tensor | None = None) -> Tensor:
        return self.product(u) + rhs

    def product(self, u: Tensor) -> Tensor:
        return self._jacobian.rmv(u)

    def take(self, rows: Tensor) -> AbstractPullback:
        return JacobianPullback(self._f.take(rows), self._z[rows])


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
