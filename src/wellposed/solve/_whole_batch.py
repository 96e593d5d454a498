"""A batch whose rows depend on each other, as one sample."""

from __future__ import annotations

import torch
from torch import Tensor

from wellposed.linalg.jacobian import AbstractJacobian
from wellposed.solve._map import AbstractMap

__all__ = ["WholeBatch"]


class WholeBatch(AbstractMap):
    """A map of a batch whose rows depend on each other, seen as a map of one row: the batch is one sample.

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

    def __init__(self, inner: AbstractJacobian, at: Tensor) -> None:
        self._inner, self._at = inner, at
        self.setup = inner.setup

    @property
    def at(self) -> Tensor:
        return self._at

    @property
    def value(self) -> Tensor:
        """(1, features) f at the point."""
        value: Tensor = self._inner.value  # type: ignore[attr-defined]  # of those that are recorded
        return value.reshape(self._at.shape)

    def mv(self, u: Tensor) -> Tensor:
        return self._inner.mv(u.reshape(self._inner.shape)).reshape(u.shape)

    def rmv(self, u: Tensor) -> Tensor:
        return self._inner.rmv(u.reshape(self._inner.shape)).reshape(u.shape)
