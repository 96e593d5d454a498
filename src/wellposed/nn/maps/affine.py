"""z -> s(W z + c) for any operator W: the map, its adjoint system, and both as splittings."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from wellposed.implicit.adjoint import AbstractPullback, AbstractStructuredMap
from wellposed.linalg.jacobian import AbstractJacobian, ProductJacobian
from wellposed.nn.activations import AbstractActivation
from wellposed.nn.maps.operator import AbstractOperator, DenseOperator, OperatorCache
from wellposed.solve.solver import is_built_in
from wellposed.solve.splitting import AbstractSplitMap

#: Rows of a probe: enough for a mean, few enough to cost little compared with a batch.
PROBES = 4


class _WithOperator(AbstractSplitMap):
    """The parts of a splitting that depend on the operator W alone; those of W^T are the same."""

    operator: AbstractOperator

    def monotonicity(self) -> tuple[float, float]:
        bounds: tuple[float, float] = self.operator.cached("monotonicity", self.operator.monotonicity)
        return bounds

    def tuned(self, name: str, tune: Callable[[float | None], float]) -> float:
        return self.operator.tuned(name, tune)


class OperatorMap(AbstractStructuredMap, _WithOperator):
    r"""f(z) = s(W z + c), with rows for samples.

    One product an evaluation; adjoints and cotangents by formula. With D = diag(s'(W z + c)) the
    system (I - J)^T u = v, J = D W, is solved for p = D u:

        p = D (v + W^T p),      dL/dc = p,      dL/dW = sum_i p_i z_i^T

    the masked adjoint of [ling2022, Lemma 2] and [nguyen2022, Lemma 3.2.2]; it vanishes where a
    unit is inactive. It has the form of the forward equation, with W^T for W and the linear
    "activation" D, the proximal operator of (1/d - 1) p^2/2 [winston2020, Theorem 2]: the same
    splittings solve it, with the same factorization.

    Args:
        operator: W.
        c: (batch, n) what the input contributes.
        activation: s.
    """

    def __init__(self, operator: AbstractOperator, c: Tensor, activation: AbstractActivation) -> None:
        self.operator, self._c, self._s = operator, c, activation
        self.writes_out = operator.writes_out
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
        slope, W = self._s.slope(self(z)), self.operator  # J = D W
        if slope is None:
            return ProductJacobian(z, W.product, W.transposed, setup=1)
        return ProductJacobian(z, lambda u: W.product(u).mul_(slope), lambda u: W.transposed(u * slope), setup=1)

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

    def affine_at_zero(self) -> Tensor:
        return self._c_plain

    def resolvent(self, v: Tensor, step_size: float) -> Tensor:
        return self.operator.resolvent(torch.add(v, self._c_plain, alpha=step_size), step_size)

    def prox(self, v: Tensor, step_size: float | Tensor) -> Tensor:
        return self._s.prox(v, step_size)

    def reflect(self, v: Tensor, step_size: float) -> Tensor:
        return self._s.reflect(v, step_size)

    def probe(self) -> OperatorMap:
        generator = torch.Generator().manual_seed(0)
        c = torch.randn(PROBES, self._c_plain.shape[1], generator=generator, dtype=torch.float64)
        return OperatorMap(self.operator, c.to(self._c_plain), self._s)


class DenseMap(OperatorMap):
    r"""f(z) = s(W z + c) for a matrix W: Z -> s(Z W^T + C). See `OperatorMap`.

    Args:
        W: (m, m).
        c: (batch, m) what the input contributes.
        activation: s.
        cache: Where factorizations of W are kept; a new one if not given.
    """

    def __init__(self, W: Tensor, c: Tensor, activation: AbstractActivation, cache: OperatorCache | None = None) -> None:
        super().__init__(DenseOperator(W, cache), c, activation)

    def tracked(self, z: Tensor) -> Tensor:
        return self._s(torch.addmm(self._c, z, self.operator.tensors[0].t()))


class _Pullback(AbstractPullback):
    """p = D (v + W^T p)."""

    def __init__(self, operator: AbstractOperator, slope: Tensor | None) -> None:
        self.operator, self.slope = operator, slope
        self.writes_out = operator.writes_out

    @property
    def built_in(self) -> bool:
        return is_built_in(self.operator)

    def rhs(self, v: Tensor) -> Tensor:
        return v.clone() if self.slope is None else v * self.slope

    def affine(self, u: Tensor, rhs: Tensor, out: Tensor | None = None) -> Tensor:
        product = self.operator.transposed(u, out)
        return product.add_(rhs) if self.slope is None else torch.addcmul(rhs, product, self.slope, out=product)

    def product(self, u: Tensor) -> Tensor:
        product = self.operator.transposed(u)
        return product if self.slope is None else product.mul_(self.slope)

    def take(self, rows: Tensor) -> _Pullback:
        return _Pullback(self.operator, None if self.slope is None else self.slope.index_select(0, rows))

    def as_map(self, rhs: Tensor, v: Tensor) -> _SplitAdjoint:
        return _SplitAdjoint(self, rhs, v)


class _SplitAdjoint(_WithOperator):
    """p -> D (W^T p + v): affine, then the prox of (1/d - 1) p^2/2, of p = 0 where d = 0.

    A step size tuned by the forward solve serves the adjoint, with the same factorization.
    """

    def __init__(self, pullback: _Pullback, rhs: Tensor, v: Tensor) -> None:
        self._pullback, self._rhs, self._v = pullback, rhs, v
        self.operator, self._slope = pullback.operator, pullback.slope
        self.writes_out = pullback.writes_out
        self._factors: dict[float, Tensor] = {}  # d/(d + a(1 - d)) by step size: the factor of the prox
        self._reflections: dict[float, Tensor] = {}  # 2 d/(d + a(1 - d)) - 1

    @property
    def built_in(self) -> bool:
        return self._pullback.built_in

    def __call__(self, z: Tensor, out: Tensor | None = None) -> Tensor:
        return self._pullback.affine(z, self._rhs, out=out)

    def take(self, rows: Tensor) -> _SplitAdjoint:
        return _SplitAdjoint(self._pullback.take(rows), self._rhs.index_select(0, rows), self._v.index_select(0, rows))

    def jacobian(self, z: Tensor) -> AbstractJacobian:
        return self._pullback.jacobian(z)

    def affine(self, z: Tensor, out: Tensor | None = None) -> Tensor:
        return self.operator.transposed(z, out).add_(self._v)

    def affine_at_zero(self) -> Tensor:
        return self._v

    def resolvent(self, v: Tensor, step_size: float) -> Tensor:
        return self.operator.resolvent(torch.add(v, self._v, alpha=step_size), step_size, transpose=True)

    def prox(self, v: Tensor, step_size: float | Tensor) -> Tensor:
        d = self._slope
        if d is None:
            return v
        if isinstance(step_size, Tensor):
            return d * v / (d + step_size * (1 - d))
        return self._factor(d, step_size) * v

    def reflect(self, v: Tensor, step_size: float) -> Tensor:
        d = self._slope
        if d is None:
            return v.clone()
        if step_size not in self._reflections:
            self._reflections[step_size] = 2 * self._factor(d, step_size) - 1
        return self._reflections[step_size] * v

    def _factor(self, d: Tensor, step_size: float) -> Tensor:
        if step_size not in self._factors:
            self._factors[step_size] = d if step_size == 1 else d / (d + step_size * (1 - d))
        return self._factors[step_size]
