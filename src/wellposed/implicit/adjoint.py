"""What an exact gradient needs: the linear system, and the graph of f at the equilibrium."""

from __future__ import annotations

import abc
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from wellposed._torch import Edge, apart, graph_edge, sequence_number, uncompiled
from wellposed._tree import Array, differs
from wellposed.errors import WellposedError
from wellposed.linalg.jacobian import AbstractJacobian, ProductJacobian
from wellposed.solve.map import AbstractMap, RowsCoupled


class AbstractPullback(abc.ABC):
    """A system u = rhs(v) + A u, whose solution carries the cotangent v through the equilibrium."""

    #: Whether `affine` uses `out=`.
    writes_out: bool = False
    #: See `AbstractMap`.
    idle_part: float = 0.0
    cost: tuple[float, int] | None = None
    plain_factor: Array | None = None

    @property
    def built_in(self) -> bool:
        """Whether the system is known to be row-wise; see `AbstractMap.built_in`."""
        return False

    def rhs(self, v: Tensor) -> Tensor:
        """The right-hand side of the cotangent v of z*; v itself unless overridden."""
        return v

    def affine(self, u: Tensor, rhs: Tensor, out: Tensor | None = None) -> Tensor:
        """rhs + A u, row by row; may write into `out`."""
        return self.product(u) + rhs

    @abc.abstractmethod
    def product(self, u: Tensor) -> Tensor:
        """A u."""

    @abc.abstractmethod
    def take(self, rows: Tensor) -> AbstractPullback:
        """The same for some of the rows."""

    def jacobian(self, u: Tensor) -> AbstractJacobian:
        """A, which no solver needs transposed."""
        return ProductJacobian(u, self.product, _no_transpose)

    def as_map(self, rhs: Tensor, v: Tensor) -> AbstractMap:
        """u -> rhs + A u for a solver of fixed points, given rhs = rhs(v)."""
        return AdjointMap(self, rhs)


class JacobianPullback(AbstractPullback):
    """(I - J)^T u = v for any map: A = J^T at the equilibrium z."""

    idle_part = 0.5  # some rows are recorded anew

    def __init__(
        self, f: AbstractMap, z: Tensor, jacobian: AbstractJacobian | None = None, plain_factor: Array | None = None
    ) -> None:
        self._f, self._z = f, z
        self._jacobian = f.jacobian(z) if jacobian is None else jacobian
        self.cost = None if f.cost is None else (2 * f.cost[0], f.cost[1])  # about two operations for each of f
        self.plain_factor = plain_factor

    @property
    def built_in(self) -> bool:
        return self._f.built_in

    def product(self, u: Tensor) -> Tensor:
        return self._jacobian.rmv(u)

    def take(self, rows: Tensor) -> AbstractPullback:
        part = self._f.take(rows)
        jacobian = part.jacobian(self._z[rows])
        whole, alone = self._jacobian.value, jacobian.value
        if whole is not None and alone is not None and bool(differs(alone, whole[rows]).any()):
            # f can only be evaluated for the whole batch, and so can its Jacobian
            return _StandingPullback(self, self._z.shape[0], rows)
        return JacobianPullback(part, self._z[rows], jacobian)


class _StandingPullback(AbstractPullback):
    """Some rows of a system with products of the whole batch only; u = 0 in the other rows.

    Their products are then 0 too, unless they depend on these rows: `RowsCoupled` is raised in that
    case.
    """

    def __init__(self, whole: JacobianPullback, batch: int, rows: Tensor) -> None:
        self._whole, self._batch, self._rows = whole, batch, rows
        self._idle = torch.ones(batch, dtype=torch.bool, device=rows.device)
        self._idle[rows] = False

    def product(self, u: Tensor) -> Tensor:
        whole = self._whole.product(u.new_zeros(self._batch, u.shape[1]).index_copy_(0, self._rows, u))
        if bool(whole[self._idle].nan_to_num(0.0, 0.0, 0.0).any()):  # 0 times an infinite slope is NaN: not a dependence
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
    """A map of given tensors, with formulas for their cotangents.

    A first derivative then needs no recorded evaluation of f. Higher derivatives use `tracked`.
    """

    def at_zero(self) -> Tensor | None:
        """f(0), if it is known without an evaluation."""
        return None

    @abc.abstractmethod
    def pullback(self, fz: Tensor) -> AbstractPullback:
        """The adjoint system at an equilibrium, given f(z) there."""

    @abc.abstractmethod
    def cotangents(self, u: Tensor, z: Tensor, needed: tuple[bool, ...]) -> tuple[Tensor | None, ...]:
        """The cotangent of each of `inputs`, given the adjoint u at z; None if not needed."""


class AdjointMap(AbstractMap):
    """u -> rhs + A u as a fixed-point map: the loop of `solve` serves backward passes too."""

    leaves_at_once = False
    strides = repeats = is_affine = True  # products with one recorded graph

    def __init__(self, pullback: AbstractPullback, rhs: Tensor) -> None:
        self._pullback, self._rhs = pullback, rhs
        self.writes_out, self.idle_part, self.cost = pullback.writes_out, pullback.idle_part, pullback.cost
        self.plain_factor = pullback.plain_factor

    @property
    def built_in(self) -> bool:
        return self._pullback.built_in

    def __call__(self, z: Tensor, out: Tensor | None = None) -> Tensor:
        return self._pullback.affine(z, self._rhs, out=out)

    def take(self, rows: Tensor) -> AbstractMap:
        return AdjointMap(self._pullback.take(rows), self._rhs.index_select(0, rows))

    def jacobian(self, z: Tensor) -> AbstractJacobian:
        return self._pullback.jacobian(z)


def _no_transpose(u: Tensor) -> Tensor:
    raise NotImplementedError("no solver needs the transpose of an adjoint system")


def check_same_map(now: Tensor | None, fz: Tensor) -> None:
    """Raises if f(z) has changed since the forward pass."""
    if now is None:
        return
    if torch.equal(now, fz):  # the usual case
        return
    finite = torch.where(fz.isfinite(), fz, 0.0)  # the rest of a row with a NaN still counts
    scale = finite.abs().amax(dim=1, keepdim=True) if fz.shape[1] else fz
    same = (now - fz).abs() <= 1e3 * torch.finfo(fz.dtype).eps * scale
    if not bool((same | ~fz.isfinite()).all()):
        raise WellposedError(
            "backward of the equilibrium: f gives another value at the equilibrium than it did in the forward pass. A "
            "parameter was changed in place between forward and backward (call backward before optimizer.step()), or f "
            "is random (make noise such as dropout constant within a solve)."
        )


def record(
    f: AbstractMap, z: Tensor, known: Sequence[Tensor], recorded: tuple[Tensor, int] | None = None
) -> tuple[Tensor, list[Tensor], AbstractMap]:
    """f(z) with its graph, the tensors that f has captured, which a second derivative needs, and f
    as it is to be recorded again.

    They are the leaves that the graph reaches other than through `known`, and, in the place of the
    leaves behind them, the tensors with a graph that f was seen to use. (To see those, if there are
    any, f is evaluated a second time.) A known tensor that is a leaf is among them too, since f may
    have captured something made of it. So is a weight that `parametrize.cached()` keeps, also if f
    itself made it: the caller can ask for it, and f finds it again after the context has ended.

    Nodes of a graph are numbered in each thread anew, so that numbers show what is older only among
    those of one thread. Outside the main thread f is always evaluated twice; in the main thread if
    the numbers cannot all be its own. (A tensor of another thread that happens to have a number
    which the main thread gave to a node outside the graph stays unseen: `Substitution.missed`.)

    `recorded` is f(z) with its graph and the `sequence_number` before it, if that was recorded
    already.
    """
    fz, since = (None, sequence_number()) if recorded is None else recorded
    fz = f.tracked(z) if fz is None else fz
    ends = {graph_edge(x) for x in known if x.grad_fn is not None}
    graph = Graph.behind(fz, ends, since, sequence_number())
    others = graph.others
    if graph.foreign or threading.current_thread() is not threading.main_thread():
        others |= graph.inner  # what f is seen to use of them in a second evaluation was there before
    if not others and not parametrize._cache:
        return fz, graph.leaves, f
    from wellposed.implicit._captured import Seen, kept_in_cache  # which needs this file

    f, kept = kept_in_cache(f, graph.inner | graph.others)
    if not others | kept:
        return fz, graph.leaves, f
    seen = Seen(others | kept)
    with seen, apart():
        again = uncompiled(lambda: f.tracked(z))
    graph = Graph.behind(again, ends | {graph_edge(alias) for _, alias in seen.found.values()})
    return fz, graph.leaves + [tensor for tensor, _ in seen.found.values()], f


@dataclass
class Graph:
    """What is behind a value.

    Attributes:
        leaves: The leaves.
        others: Edges to nodes that are not numbered as the new ones, where the walk stops.
        inner: Edges to the nodes between.
        nodes: Those.
        foreign: Whether their numbers cannot all be of one thread, in which each is given once and
            a node is made after those behind it.
    """

    leaves: list[Tensor] = field(default_factory=list)
    others: set[Edge] = field(default_factory=set)
    inner: set[Edge] = field(default_factory=set)
    nodes: set[Any] = field(default_factory=set)
    foreign: bool = False

    @classmethod
    def behind(cls, value: Tensor, ends: set[Edge], since: int = 0, until: float = math.inf) -> Graph:
        """Stops at `ends`, and at nodes that are not numbered from `since` to `until`."""
        graph = cls()
        leaves: dict[int, Tensor] = {}
        numbers: set[int] = set()
        ahead: list[tuple[Any, int, float]] = [(*graph_edge(value), until)]
        while ahead:
            node, output, last = ahead.pop()
            if node is None or (node, output) in ends:
                continue
            leaf = getattr(node, "variable", None)
            if leaf is not None:
                leaves[id(leaf)] = leaf
                continue
            number = node._sequence_nr()
            if not since <= number < until:
                graph.others.add((node, output))
                continue
            graph.foreign = graph.foreign or number >= last
            graph.inner.add((node, output))
            if node not in graph.nodes:
                graph.foreign = graph.foreign or number in numbers
                numbers.add(number)
                graph.nodes.add(node)
                ahead.extend((*edge, number) for edge in node.next_functions)
        graph.leaves = list(leaves.values())
        return graph
