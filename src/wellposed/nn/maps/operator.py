"""Linear operators W on rows, as the affine part of a cell, and what is computed once per set of parameters."""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["AbstractOperator", "Habit", "Memory"]

#: Relative change of the norm of a tensor below which what was learned about it is kept.
SMALL_CHANGE = 0.02


@dataclass
class Habit:
    """A number learned about an operator that may be a little out of date without being wrong.

    Attributes:
        value: The number.
        sizes: Norms of the tensors that it was learned from.
        rest: Versions of them for which it is used before it is learned anew.
        patience: Those that it was given.
    """

    value: float
    sizes: tuple[float, ...]
    rest: int
    patience: int

    def still_good(self, sizes: tuple[float, ...]) -> bool:
        """Whether tensors with these norms may use it."""
        near = (abs(new - old) <= SMALL_CHANGE * old for new, old in zip(sizes, self.sizes, strict=True))
        return self.rest > 0 and all(near)


class Memory:
    """What was computed from an operator's tensors (factorizations, bounds), as long as these keep their values.

    A cell owns one and hands it to every operator it makes, so that forward, adjoint and the next solve share a factorization.
    Values are compared, not version counters: a change through `.data` moves no counter.

    Attributes:
        habits: What solvers learned and want to keep when parameters change, such as a step size.
    """

    def __init__(self) -> None:
        self._tensors: tuple[Tensor, ...] | None = None
        self._known: dict[Any, Any] = {}
        self.habits: dict[str, Habit] = {}

    def of(self, tensors: tuple[Tensor, ...]) -> dict[Any, Any]:
        """The dictionary for these tensors: empty unless they equal those of the call before."""
        known = self._tensors
        same = known is not None and len(known) == len(tensors) and all(map(_equal, known, tensors))
        if not same:
            self._tensors, self._known = tuple(x.detach().clone() for x in tensors), {}
        return self._known

    def __deepcopy__(self, memo: dict[int, Any]) -> Memory:
        """A copy of a cell starts with an empty memory."""
        return Memory()

    def __reduce__(self) -> tuple[type[Memory], tuple[()]]:
        return Memory, ()


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.device == b.device and a.shape == b.shape and torch.equal(a, b)


class AbstractOperator(abc.ABC):
    """A linear operator W on the features of every row, with its transpose, its resolvent and its derivatives.

    Everything but `tracked` works without a graph.

    Args:
        tensors: What W is made of, with their graph.
        memory: Shared by the operators of a cell; a new one if not given.
    """

    #: Whether products are written to `out`.
    writes_out: bool = False

    def __init__(self, tensors: tuple[Tensor, ...], memory: Memory | None) -> None:
        self.tensors = tensors
        self.plain = tuple(x.detach() for x in tensors)
        self.memory = Memory() if memory is None else memory
        self._known: dict[Any, Any] | None = None

    def recall(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` returned for the same key and the same values of the tensors."""
        if self._known is None:
            self._known = self.memory.of(self.plain)
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    @abc.abstractmethod
    def with_tensors(self, *tensors: Tensor) -> AbstractOperator:
        """The same kind of operator made of other tensors."""

    @abc.abstractmethod
    def product(self, z: Tensor, out: Tensor | None = None) -> Tensor:
        """(batch, n) W z; a new tensor, or `out` if it is used."""

    @abc.abstractmethod
    def transposed(self, p: Tensor, out: Tensor | None = None) -> Tensor:
        """(batch, n) W^T p; a new tensor, or `out` if it is used."""

    @abc.abstractmethod
    def tracked(self, z: Tensor) -> Tensor:
        """W z with a graph to z and to the tensors."""

    @abc.abstractmethod
    def cotangents(self, p: Tensor, z: Tensor, needed: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
        """The gradient of the sum of <p, W z> over rows with respect to each tensor."""

    @abc.abstractmethod
    def resolvent(self, v: Tensor, step_size: float, *, transpose: bool = False) -> Tensor:
        """(batch, n) the z with z + step_size (I - W) z = v, or the same with W^T."""

    @abc.abstractmethod
    def monotonicity(self) -> tuple[float, float]:
        """(m, L): a lower bound of the least eigenvalue of sym(I - W) and an upper bound of |I - W|."""

    def affine(self, z: Tensor, c: Tensor, out: Tensor | None = None) -> Tensor:
        """(batch, n) W z + c."""
        return self.product(z, out).add_(c)

    def symmetric(self, z: Tensor, shift: float = 0.0) -> Tensor:
        """(batch, n) sym(I - W) z + shift z."""
        return (1 + shift) * z - (self.product(z) + self.transposed(z)) / 2

    def dense(self, features: int) -> Tensor:
        """(n, n) the matrix, from its products with the unit vectors."""
        x = self.plain[0]
        dtype = x.real.dtype if x.is_complex() else x.dtype
        return self.product(torch.eye(features, dtype=dtype, device=x.device)).t()
