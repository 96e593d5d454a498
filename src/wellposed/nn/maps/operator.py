"""Linear operators W of cells, and what is computed once per value of their tensors."""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wellposed.errors import InvalidArgument, InvalidType
from wellposed.linalg.bounds import least_eigenvalue_lower, spectral_norm_upper
from wellposed.linalg.direct import inverse_of_positive

#: Relative change of the norm of a tensor below which a tuned value is kept.
SMALL_CHANGE = 0.02
#: Versions of the parameters after which a tuned value that did not change is measured again.
MOST_PATIENCE = 16


@dataclass
class TunedValue:
    """A number measured on an operator that may be a little out of date, such as a step size.

    Attributes:
        value: The number.
        sizes: Norms of the tensors on which it was measured.
        rest: Versions of them for which it is used before it is measured again.
        patience: The first value of `rest`.
    """

    value: float
    sizes: tuple[float, ...]
    rest: int
    patience: int

    def still_good(self, sizes: tuple[float, ...]) -> bool:
        """Whether tensors with these norms may use it."""
        near = (abs(new - old) <= SMALL_CHANGE * old for new, old in zip(sizes, self.sizes, strict=True))
        return self.rest > 0 and all(near)


class OperatorCache:
    """Factorizations and bounds of an operator, valid while its tensors keep their values.

    A cell owns one and gives it to every operator it makes, so that forward, adjoint and the next
    solve share a factorization. Values are compared, not version counters: a change through `.data`
    does not change the counter.

    Attributes:
        tuned: What solvers measured and keep when parameters change, by name.
    """

    def __init__(self) -> None:
        self._tensors: tuple[Tensor, ...] | None = None
        self._known: dict[Any, Any] = {}
        self.tuned: dict[str, TunedValue] = {}

    def of(self, tensors: tuple[Tensor, ...]) -> dict[Any, Any]:
        """The dictionary for these tensors: empty unless they equal those of the call before."""
        known = self._tensors
        same = known is not None and len(known) == len(tensors) and all(map(_equal, known, tensors))
        if not same:
            self._tensors, self._known = tuple(x.detach().clone() for x in tensors), {}
        return self._known

    def __deepcopy__(self, memo: dict[int, Any]) -> OperatorCache:
        """A copy of a cell starts with an empty cache."""
        return OperatorCache()

    def __reduce__(self) -> tuple[type[OperatorCache], tuple[()]]:
        return OperatorCache, ()


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.device == b.device and a.shape == b.shape and torch.equal(a, b)


class AbstractOperator(abc.ABC):
    """A linear operator W on every sample, with its transpose and its derivatives.

    A square operator of rows (batch, n) also has a resolvent and bounds, so that splittings can use
    it. Everything but `tracked` works without a graph.

    Args:
        tensors: What W is made of, with their graph.
        cache: Shared by the operators of a cell; a new one if not given.
    """

    #: Whether products are written to `out`.
    writes_out: bool = False

    def __init__(self, tensors: tuple[Tensor, ...], cache: OperatorCache | None = None) -> None:
        self.tensors = tensors
        self.plain = tuple(x.detach() for x in tensors)
        self.cache = OperatorCache() if cache is None else cache
        self._known: dict[Any, Any] | None = None

    def cached(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` returned for the same key and the same values of the tensors."""
        if self._known is None:
            self._known = self.cache.of(self.plain)
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def tuned(self, name: str, tune: Callable[[float | None], float]) -> float:
        """What `tune` found for these tensors, or for earlier ones that were much like them."""
        known = self.cache.tuned

        def make() -> float:
            sizes = tuple(float(torch.linalg.vector_norm(x)) for x in self.plain)
            last = known.get(name)
            if last is not None and last.still_good(sizes):
                last.rest -= 1
                return last.value
            value = tune(None if last is None else last.value)
            patience = min(2 * last.patience, MOST_PATIENCE) if last is not None and last.value == value else 1
            known[name] = TunedValue(value, sizes, patience, patience)
            return value

        step_size: float = self.cached(name, make)
        return step_size

    @abc.abstractmethod
    def with_tensors(self, *tensors: Tensor) -> AbstractOperator:
        """The same kind of operator made of other tensors."""

    @abc.abstractmethod
    def product(self, z: Tensor, out: Tensor | None = None) -> Tensor:
        """W z; a new tensor, or `out` if it is used."""

    @abc.abstractmethod
    def transposed(self, p: Tensor, out: Tensor | None = None) -> Tensor:
        """W^T p; a new tensor, or `out` if it is used."""

    @abc.abstractmethod
    def tracked(self, z: Tensor) -> Tensor:
        """W z with a graph to z and to the tensors."""

    @abc.abstractmethod
    def cotangents(self, p: Tensor, z: Tensor, needed: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
        """The gradient of the sum of <p, W z> over samples with respect to each tensor."""

    def affine(self, z: Tensor, c: Tensor, out: Tensor | None = None) -> Tensor:
        """W z + c."""
        return self.product(z, out).add_(c)

    def resolvent(self, v: Tensor, step_size: float, *, transpose: bool = False) -> Tensor:
        """(batch, n) the z with z + step_size (I - W) z = v, or the same with W^T."""
        raise InvalidType(f"{type(self).__name__} has no resolvent. Use Auto(), ForwardBackward() or NewtonKrylov().")

    def monotonicity(self) -> tuple[float, float]:
        """(m, L): a lower bound of lambda_min(sym(I - W)) and an upper bound of |I - W|."""
        raise InvalidType(f"{type(self).__name__} has no bounds of I - W. Give the solver a step_size, or use Auto().")

    def symmetric(self, z: Tensor, shift: float = 0.0) -> Tensor:
        """(batch, n) sym(I - W) z + shift z."""
        return (1 + shift) * z - (self.product(z) + self.transposed(z)) / 2

    def dense(self, features: int) -> Tensor:
        """(n, n) the matrix, from its products with the unit vectors."""
        x = self.plain[0]
        dtype = x.real.dtype if x.is_complex() else x.dtype
        return self.product(torch.eye(features, dtype=dtype, device=x.device)).t()


class DenseOperator(AbstractOperator):
    """A matrix W, with the LU factors of I + a(I - W) once per step size and value of W.

    At 1000 units and 128 samples a solve with the factors takes as long as a product, and they cost
    a third of an inverse.
    """

    writes_out = True

    def __init__(self, W: Tensor, cache: OperatorCache | None = None) -> None:
        super().__init__((W,), cache)
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
        factor, pivots = self.cached(("LU", step_size), lambda: self._factor(step_size))
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

    W is formed once per value of A and B, without a graph, and so is the inverse of I + a(I - W):
    with a forward and an adjoint solve of some ten steps each, products with it are cheaper than
    solves with LU factors. Cotangents need no m x m x m product: with rows p, z of a batch and G =
    sum p z^T,

        dA = -A (G + G^T) = -((A p)^T z + (A z)^T p),      dB = G - G^T    [nguyen2022, Lemma 3.2.1]

    Args:
        A: (k, m). B: (m, m). margin: m.
        cache: Of the cell.
    """

    def __init__(self, A: Tensor, B: Tensor, margin: float, cache: OperatorCache | None = None) -> None:
        AbstractOperator.__init__(self, (A, B), cache)
        self._margin = margin
        self._W = self.cached("W", self._form)

    def _form(self) -> Tensor:
        """Like `Monotone`, in place: three passes over a matrix and one product."""
        A, B = self.plain
        W = torch.sub(B, B.t()).addmm_(A.t(), A, alpha=-1)
        W.diagonal().add_(1 - self._margin)
        return W

    def resolvent(self, v: Tensor, step_size: float, *, transpose: bool = False) -> Tensor:
        inverse = self.cached(("inverse", step_size), lambda: inverse_of_positive(self._shifted(step_size)))
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
