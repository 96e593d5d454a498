"""A map that is evaluated for all its rows only, and a batch that is one sample."""

from __future__ import annotations

import torch
from torch import Tensor

from wellposed.linalg.jacobian import AbstractJacobian
from wellposed.solve.map import AbstractMap, StandingRows

__all__ = ["Together", "WholeBatch"]


class Together(AbstractMap):
    """A map that is only evaluated for all its rows: those of finished samples stand still.

    Args:
        f: The map.
        z: (batch, features) where it was evaluated last. fz: (batch, features) f there.
    """

    def __init__(self, f: AbstractMap, z: Tensor, fz: Tensor) -> None:
        self.inner = f
        self._seen = (z, fz)

    def __call__(self, z: Tensor, out: Tensor | None = None) -> Tensor:
        value = self.inner(z)
        self._seen = (z, value)
        return value

    def tracked(self, z: Tensor) -> Tensor:
        return self.inner.tracked(z)

    def take(self, rows: Tensor) -> AbstractMap:
        return StandingRows(self, *self._seen, rows)

    def jacobian(self, z: Tensor) -> AbstractJacobian:
        return self.inner.jacobian(z)


class WholeBatch(AbstractMap):
    """A map of a batch whose rows depend on each other, as a map of one row.

    Args:
        f: The map.
        shape: (batch, features) of its states.
    """

    def __init__(self, f: AbstractMap, shape: torch.Size) -> None:
        self._f, self._shape = f, shape
        self.steady = f.steady

    @property
    def built_in(self) -> bool:
        return self._f.built_in

    def __call__(self, z: Tensor, out: Tensor | None = None) -> Tensor:
        return self._f(z.reshape(self._shape)).reshape(1, -1)

    def tracked(self, z: Tensor) -> Tensor:
        return self._f.tracked(z.reshape(self._shape)).reshape(1, -1)

    def inputs(self) -> tuple[Tensor, ...]:
        return self._f.inputs()

    def with_inputs(self, *inputs: Tensor) -> WholeBatch:
        return WholeBatch(self._f.with_inputs(*inputs), self._shape)

    def take(self, rows: Tensor) -> AbstractMap:
        return self  # there is only one row

    def jacobian(self, z: Tensor) -> AbstractJacobian:
        return _WholeJacobian(self._f.jacobian(z.reshape(self._shape)), z)

    def forget(self) -> None:
        self._f.forget()


class _WholeJacobian(AbstractJacobian):
    """The Jacobian of a whole batch as that of one row."""

    def __init__(self, inner: AbstractJacobian, point: Tensor) -> None:
        super().__init__(point)
        self._inner = inner
        self.setup = inner.setup

    @property
    def value(self) -> Tensor | None:
        return None if self._inner.value is None else self._inner.value.reshape(self.point.shape)

    def mv(self, u: Tensor) -> Tensor:
        return self._inner.mv(u.reshape(self._inner.shape)).reshape(u.shape)

    def rmv(self, u: Tensor) -> Tensor:
        return self._inner.rmv(u.reshape(self._inner.shape)).reshape(u.shape)
