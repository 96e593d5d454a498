"""A map that is evaluated for all its rows only, and a batch that is one sample."""

from __future__ import annotations

import torch
from torch import Tensor

from wellposed.linalg.jacobian import AbstractJacobian, ProductJacobian
from wellposed.solve.map import AbstractMap, StandingRows


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
        inner, shape = self._f.jacobian(z.reshape(self._shape)), self._shape
        return ProductJacobian(
            z,
            lambda u: inner.mv(u.reshape(shape)).reshape(u.shape),
            lambda u: inner.rmv(u.reshape(shape)).reshape(u.shape),
            value=None if inner.value is None else inner.value.reshape(z.shape),
            setup=inner.setup,
        )

    def forget(self) -> None:
        self._f.forget()
