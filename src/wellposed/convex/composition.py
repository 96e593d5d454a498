"""T = stage_L o ... o stage_1 as a map of rows that knows its own derivatives."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from wellposed.convex.stages import AbstractStage, Tangent, Unit
from wellposed.implicit.adjoint import AbstractPullback, AbstractStructuredMap, JacobianPullback
from wellposed.linalg import AbstractJacobian
from wellposed.solve.solver import is_built_in

__all__ = ["CompositionMap"]


class CompositionMap(AbstractStructuredMap):
    r"""z -> stage_L(... stage_1(z)), with rows for samples [xie2021, eq. (4)].

    With J_l the Jacobian of stage l at z_(l-1) = stage_(l-1)(... z), a cotangent v of the equilibrium becomes
    q_L = (I - J_L ... J_1)^(-T) v, and stage l sees q_l with q_(l-1) = J_l^T q_l.

    Args:
        stages: In the order in which they are applied.
        shape: The shape of one state, such as (m,) or (channels, height, width).
        coupled: A stage mixes the samples; the whole batch is then one row, because it has one equilibrium.
    """

    def __init__(self, stages: Sequence[AbstractStage], shape: tuple[int, ...], *, coupled: bool = False) -> None:
        self.stages, self.shape, self.coupled = tuple(stages), shape, coupled
        self._counts = [len(stage.inputs()) for stage in stages]

    @property
    def built_in(self) -> bool:
        return is_built_in(self, *self.stages)

    def __call__(self, z: Tensor, out: Tensor | None = None) -> Tensor:
        state = self._state(z)
        with torch.no_grad():
            for stage in self.stages:
                state = stage.in_place(state) if isinstance(stage, Unit) else stage(state)
        return state.reshape(z.shape)

    def tracked(self, z: Tensor) -> Tensor:
        state = self._state(z)
        for stage in self.stages:
            state = stage(state)
        return state.reshape(z.shape)

    def take(self, rows: Tensor) -> CompositionMap:
        if self.coupled:
            return self  # there is only one row
        return CompositionMap([stage.take(rows) for stage in self.stages], self.shape)

    def jacobian(self, z: Tensor) -> AbstractJacobian:
        return _ChainJacobian(self._linearize(z), z, self.shape)

    # AbstractStructuredMap

    def inputs(self) -> tuple[Tensor, ...]:
        return tuple(tensor for stage in self.stages for tensor in stage.inputs())

    def with_inputs(self, *inputs: Tensor) -> CompositionMap:
        remaining = iter(inputs)
        stages = [
            stage.with_inputs(*(next(remaining) for _ in range(count)))
            for stage, count in zip(self.stages, self._counts, strict=True)
        ]
        return CompositionMap(stages, self.shape, coupled=self.coupled)

    def pullback(self, fz: Tensor) -> AbstractPullback:
        # At the equilibrium z and f(z) agree to the tolerance of the solve, and only f(z) is handed over.
        return JacobianPullback(self, fz)

    def cotangents(self, u: Tensor, z: Tensor, needed: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
        found: list[Tensor] = []
        with torch.no_grad():
            q = self._state(u)
            for stage, before in reversed(list(zip(self.stages, self.states(z), strict=False))):
                q, cotangents = stage.pull(q, before)
                found = [*cotangents, *found]
        return tuple(tensor if need else None for tensor, need in zip(found, needed, strict=True))

    def states(self, z: Tensor) -> list[Tensor]:
        """z_0 = z, z_1, ..., z_L: the state before and after every stage, without a graph."""
        states = [self._state(z)]
        with torch.no_grad():
            for stage in self.stages:
                states.append(stage.in_place(states[-1]) if isinstance(stage, Unit) else stage(states[-1]))
        return states

    def adjoints(self, u: Tensor, z: Tensor) -> list[tuple[AbstractStage, Tensor, Tensor]]:
        """Of every stage l: itself, the state z_(l-1) before it, and the cotangent q_l after it; u is q_L."""
        parts, q = [], self._state(u)
        with torch.no_grad():
            for stage, before in reversed(list(zip(self.stages, self.states(z), strict=False))):
                parts.append((stage, before, q))
                q = stage.linearize(before).rmv(q)
        return parts[::-1]

    def _state(self, rows: Tensor) -> Tensor:
        return rows.reshape(-1, *self.shape)

    def _linearize(self, z: Tensor) -> list[Tangent]:
        state, tangents = self._state(z), []
        with torch.no_grad():
            for stage in self.stages:
                tangents.append(stage.linearize(state))
                state = tangents[-1].value
        return tangents


class _ChainJacobian(AbstractJacobian):
    """J_L ... J_1."""

    setup = 1

    def __init__(self, tangents: list[Tangent], point: Tensor, shape: tuple[int, ...]) -> None:
        super().__init__(point)
        self._tangents, self._shape = tangents, shape

    @property
    def value(self) -> Tensor:
        """(batch, features) f at the point."""
        return self._tangents[-1].value.reshape(self.point.shape)

    def mv(self, u: Tensor) -> Tensor:
        state = u.reshape(-1, *self._shape)
        with torch.no_grad():
            for tangent in self._tangents:
                state = tangent.mv(state)
        return state.reshape(u.shape)

    def rmv(self, u: Tensor) -> Tensor:
        state = u.reshape(-1, *self._shape)
        with torch.no_grad():
            for tangent in reversed(self._tangents):
                state = tangent.rmv(state)
        return state.reshape(u.shape)
