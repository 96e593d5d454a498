"""z -> s(W z + c) for any operator W: the map of a cell, its adjoint system, and both as splittings."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from wellposed.implicit import AbstractPullback, AbstractStructuredMap, AdjointMap
from wellposed.linalg import AbstractJacobian
from wellposed.nn.activations import AbstractActivation
from wellposed.nn.maps.operator import AbstractOperator, Habit
from wellposed.solve import AbstractSplitMap
from wellposed.solve._map import is_built_in

__all__ = ["OperatorMap"]

#: Rows of a probe: enough for a mean, few enough to cost nothing beside a batch.
PROBES = 4
#: Versions of the parameters after which a step size that has proved itself is measured again.
MOST_PATIENCE = 16


class OperatorMap(AbstractStructuredMap, AbstractSplitMap):
    r"""f(z) = s(W z + c), with rows for samples.

    One product an evaluation; adjoints and cotangents by formula. With D = diag(s'(W z + c)) the system (I - J)^T u = v,
    J = D W, is solved for p = D u:

        p = D (v + W^T p),      dL/dc = p,      dL/dW = sum_i p_i z_i^T

    the masked adjoint of [ling2022, Lemma 2] and [nguyen2022, Lemma 3.2.2]; it vanishes where a unit is inactive. It has the
    form of the forward equation, with W^T for W and the linear "activation" D, the proximal operator of (1/d - 1) p^2/2
    [winston2020, Theorem 2]: the same splittings solve it, with the same factorization.

    Args:
        operator: W.
        c: (batch, n) what the input contributes.
        activation: s.
    """

    def __init__(self, operator: AbstractOperator, c: Tensor, activation: AbstractActivation) -> None:
        self.operator, self._c, self._s = operator, c, activation
        self.writes_out = operator.writes_out
        self.steady = True  # affine, then 1-Lipschitz
        self._c_plain = c.detach()

    @property
    def built_in(self) -> bool:
        return is_built_in(self, self.operator, self._s)

    def __call__(self, z: Tensor, out: Tensor | None = None) -> Tensor:
        return self._s.apply_(self.affine(z, out=out))

    def at_zero(self) -> Tensor:
        return self._s(self._c_plain)

    def tracked(self, z: Tensor) -> Tensor:
        return self._s(self.operator.tracked(z) + self._c)

    def take(self, rows: Tensor) -> OperatorMap:
        return OperatorMap(self.operator, self._c_plain.index_select(0, rows), self._s)

    def jacobian(self, z: Tensor) -> AbstractJacobian:
        return _Jacobian(self.operator, self._s.slope(self(z)), z)

    # AbstractStructuredMap

    def inputs(self) -> tuple[Tensor, ...]:
        return *self.operator.tensors, self._c

    def with_inputs(self, *inputs: Tensor) -> OperatorMap:
        *tensors, c = inputs
        return OperatorMap(self.operator.with_tensors(*tensors), c, self._s)

    def pullback(self, fz: Tensor) -> AbstractPullback:
        return _Pullback(self.operator, self._s.slope(fz))

    def cotangents(self, u: Tensor, z: Tensor, needed: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
        return *self.operator.cotangents(u, z, needed[:-1]), u if needed[-1] else None

    # AbstractSplitMap

    def affine(self, z: Tensor, out: Tensor | None = None) -> Tensor:
        return self.operator.affine(z, self._c_plain, out)

    def resolvent(self, v: Tensor, step_size: float) -> Tensor:
        return self.operator.resolvent(torch.add(v, self._c_plain, alpha=step_size), step_size)

    def prox(self, v: Tensor, step_size: float | Tensor) -> Tensor:
        return self._s.prox(v, step_size)

    def reflect(self, v: Tensor, step_size: float) -> Tensor:
        return self._s.reflect(v, step_size)

    def monotonicity(self) -> tuple[float, float]:
        bounds: tuple[float, float] = self.operator.recall("monotonicity", self.operator.monotonicity)
        return bounds

    def affine_at_zero(self) -> Tensor:
        return self._c_plain

    def probe(self) -> OperatorMap:
        generator = torch.Generator().manual_seed(0)
        c = torch.randn(PROBES, self._c_plain.shape[1], generator=generator, dtype=torch.float64)
        return OperatorMap(self.operator, c.to(self._c_plain), self._s)

    def tuned(self, name: str, tune: Callable[[float | None], float]) -> float:
        return _tuned(self.operator, name, tune)


def _tuned(operator: AbstractOperator, name: str, tune: Callable[[float | None], float]) -> float:
    """What `tune` found for these tensors, or for a version before that was much like them."""
    habits = operator.memory.habits

    def make() -> float:
        sizes = tuple(float(torch.linalg.vector_norm(x)) for x in operator.plain)
        habit = habits.get(name)
        if habit is not None and habit.still_good(sizes):
            habit.rest -= 1
            return habit.value
        value = tune(None if habit is None else habit.value)
        patience = min(2 * habit.patience, MOST_PATIENCE) if habit is not None and habit.value == value else 1
        habits[name] = Habit(value, sizes, patience, patience)
        return value

    step_size: float = operator.recall(name, make)
    return step_size


class _Pullback(AbstractPullback):
    """p = D (v + W^T p)."""

    def __init__(self, operator: AbstractOperator, slope: Tensor | None) -> None:
        self._W, self._slope = operator, slope
        self.writes_out = operator.writes_out

    @property
    def built_in(self) -> bool:
        return is_built_in(self._W)

    def rhs(self, v: Tensor) -> Tensor:
        return v.clone() if self._slope is None else v * self._slope

    def affine(self, u: Tensor, rhs: Tensor, out: Tensor | None = None) -> Tensor:
        product = self._W.transposed(u, out)
        return product.add_(rhs) if self._slope is None else torch.addcmul(rhs, product, self._slope, out=product)

    def product(self, u: Tensor) -> Tensor:
        product = self._W.transposed(u)
        return product if self._slope is None else product.mul_(self._slope)

    def take(self, rows: Tensor) -> _Pullback:
        return _Pullback(self._W, None if self._slope is None else self._slope.index_select(0, rows))

    def as_map(self, rhs: Tensor, v: Tensor) -> AdjointMap:
        return _SplitAdjoint(self, rhs, v)


class _SplitAdjoint(AdjointMap, AbstractSplitMap):
    """p -> D (W^T p + v): affine, then the proximal operator of (1/d - 1) p^2/2, of p = 0 where d = 0."""

    def __init__(self, pullback: _Pullback, rhs: Tensor, v: Tensor) -> None:
        super().__init__(pullback, rhs)
        self._own, self._v = pullback, v
        self._factors: dict[float, Tensor] = {}  # d/(d + a(1 - d)) by step size: what the prox multiplies with
        self._reflections: dict[float, Tensor] = {}  # 2 d/(d + a(1 - d)) - 1

    def take(self, rows: Tensor) -> _SplitAdjoint:
        return _SplitAdjoint(self._own.take(rows), self._rhs.index_select(0, rows), self._v.index_select(0, rows))

    def affine(self, z: Tensor, out: Tensor | None = None) -> Tensor:
        return self._own._W.transposed(z, out).add_(self._v)

    def affine_at_zero(self) -> Tensor:
        return self._v

    def resolvent(self, v: Tensor, step_size: float) -> Tensor:
        return self._own._W.resolvent(torch.add(v, self._v, alpha=step_size), step_size, transpose=True)

    def prox(self, v: Tensor, step_size: float | Tensor) -> Tensor:
        d = self._own._slope
        if d is None:
            return v
        if isinstance(step_size, Tensor):
            return d * v / (d + step_size * (1 - d))
        return self._factor(d, step_size) * v

    def reflect(self, v: Tensor, step_size: float) -> Tensor:
        d = self._own._slope
        if d is None:
            return v.clone()
        if step_size not in self._reflections:
            self._reflections[step_size] = 2 * self._factor(d, step_size) - 1
        return self._reflections[step_size] * v

    def _factor(self, d: Tensor, step_size: float) -> Tensor:
        if step_size not in self._factors:
            self._factors[step_size] = d if step_size == 1 else d / (d + step_size * (1 - d))
        return self._factors[step_size]

    def monotonicity(self) -> tuple[float, float]:
        operator = self._own._W  # of W^T they are the same
        bounds: tuple[float, float] = operator.recall("monotonicity", operator.monotonicity)
        return bounds

    def probe(self) -> OperatorMap | None:
        return None  # what was learned forward serves backward: the factorization is the same

    def tuned(self, name: str, tune: Callable[[float | None], float]) -> float:
        return _tuned(self._own._W, name, tune)


class _Jacobian(AbstractJacobian):
    """J = D W."""

    setup = 1

    def __init__(self, operator: AbstractOperator, slope: Tensor | None, at: Tensor) -> None:
        self._W, self._slope, self._at = operator, slope, at

    @property
    def at(self) -> Tensor:
        return self._at

    def mv(self, u: Tensor) -> Tensor:
        product = self._W.product(u)
        return product if self._slope is None else product.mul_(self._slope)

    def rmv(self, u: Tensor) -> Tensor:
        return self._W.transposed(u if self._slope is None else u * self._slope)
