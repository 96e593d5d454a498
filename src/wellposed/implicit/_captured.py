"""Tensors with a graph that f has captured: they are found, and others put in their place."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from wellposed._torch import Edge, apart, graph_edge, sequence_number, uncompiled, without_modes
from wellposed._tree import map_tensors
from wellposed.implicit.adjoint import AbstractStructuredMap
from wellposed.linalg.jacobian import AbstractJacobian
from wellposed.solve.map import AbstractMap


class Substitution(TorchFunctionMode):
    """Inside, every function of torch gets other tensors for given ones that have a graph.

    So do custom `autograd.Function`s, which no mode of torch sees. What an enclosing substitution
    puts in the place of a tensor is what this one sees.

    Args:
        old, new: The tensors.
        recorded: Nodes of a graph that was recorded before: a tensor with one of them that is used
            and not replaced is among the `missed`.
    """

    def __init__(self, old: Sequence[Tensor], new: Sequence[Tensor], recorded: Collection[Any] = ()) -> None:
        super().__init__()
        self._new = {graph_edge(x): y for x, y in zip(old, new, strict=True) if x.grad_fn is not None}
        self._recorded = recorded
        self._outer: Substitution | None = None
        self.used: set[Edge] = set()
        self.missed: set[Edge] = set()

    def __enter__(self) -> Any:
        self._outer = Substitution.active()
        _local.active = self
        _watch_custom_functions(1)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _local.active = self._outer
        _watch_custom_functions(-1)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = self.replaced((args, kwargs or {}))
        _local.active = self._outer  # as torch does while func runs
        try:
            return func(*args, **kwargs)
        finally:
            _local.active = self

    @staticmethod
    def active() -> Substitution | None:
        """The innermost one of this thread."""
        return getattr(_local, "active", None)

    def replaced(self, tree: Any) -> Any:
        """The structure with what stands in the place of its tensors."""
        with without_modes():  # the graph of x is asked for, not that of what stands in its place
            return map_tensors(self._replace_all, tree)

    def _replace_all(self, x: Tensor) -> Tensor:
        return self._replace(x if self._outer is None else self._outer._replace_all(x))

    def _replace(self, x: Tensor) -> Tensor:
        if x.grad_fn is None:
            return x
        edge = graph_edge(x)
        if edge not in self._new:
            self.missed.update([edge] if edge[0] in self._recorded else ())
            return x
        self.used.add(edge)
        return self._new[edge]


_local = threading.local()
_lock, _watching = threading.Lock(), 0
_own_apply: Any = vars(torch.autograd.Function)["apply"]


def _watch_custom_functions(more: int) -> None:
    """Lets custom functions pass through `_apply` while there are substitutions, in any thread."""
    global _watching
    with _lock:
        _watching += more
        torch.autograd.Function.apply = classmethod(_apply) if _watching else _own_apply  # type: ignore[assignment, method-assign]


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    if (active := Substitution.active()) is not None:
        args, kwargs = active.replaced((args, kwargs))
    return _own_apply.__func__(cls, *args, **kwargs)


class Seen(Substitution):
    """Records the tensors at given edges when they are used, and puts aliases in their place."""

    def __init__(self, edges: set[Edge]) -> None:
        super().__init__((), ())
        self.edges = edges
        self.found: dict[Edge, tuple[Tensor, Tensor]] = {}

    def _replace(self, x: Tensor) -> Tensor:
        if x.grad_fn is None or graph_edge(x) not in self.edges:
            return x
        if graph_edge(x) not in self.found:
            with torch.enable_grad():  # the first use may be in a solve inside f
                self.found[graph_edge(x)] = x, x.view_as(x)
        return self.found[graph_edge(x)][1]


class _Again(Substitution):
    """What a substitution that has ended did, with those around it."""

    def __init__(self, ended: Substitution) -> None:
        super().__init__((), ())
        self._ended = ended

    def _replace_all(self, x: Tensor) -> Tensor:
        return self._ended._replace_all(x if self._outer is None else self._outer._replace_all(x))


class _Inside(AbstractMap):
    """A map that was recorded inside a context: it is evaluated in such a context whenever it is
    recorded again."""

    def __init__(self, f: AbstractMap, around: Callable[[], AbstractContextManager[Any]]) -> None:
        self._f, self._around = f, around
        self.cost, self.idle_part = f.cost, f.idle_part

    @property
    def built_in(self) -> bool:
        return self._f.built_in

    def __call__(self, z: Tensor, out: Tensor | None = None) -> Tensor:
        return self._f(z)

    def tracked(self, z: Tensor) -> Tensor:
        with self._around():
            return self._f.tracked(z)

    def inputs(self) -> tuple[Tensor, ...]:
        return self._f.inputs()

    def with_inputs(self, *inputs: Tensor) -> AbstractMap:
        return _Inside(self._f.with_inputs(*inputs), self._around)

    def take(self, rows: Tensor) -> AbstractMap:
        return self._f.take(rows)  # for products with the Jacobian, which depends on values alone

    def jacobian(self, z: Tensor) -> AbstractJacobian:
        return self._f.jacobian(z)

    def forget(self) -> None:
        self._f.forget()


def _cached_weights() -> dict[Any, Tensor]:
    """What `parametrize.cached()` of the caller keeps, with a graph."""
    kept = parametrize._cache.items()
    return {key: value for key, value in kept if isinstance(value, Tensor) and value.grad_fn is not None}


@contextmanager
def _caching(weights: dict[Any, Tensor]) -> Iterator[None]:
    """A `parametrize.cached()` that keeps these weights and forgets what else is made in it."""
    before = parametrize._cache_enabled, parametrize._cache
    parametrize._cache_enabled, parametrize._cache = before[0] + 1, {**before[1], **weights}
    try:
        yield
    finally:
        parametrize._cache_enabled, parametrize._cache = before


def as_seen_inside(f: AbstractMap) -> AbstractMap:
    """f, for a later evaluation, as a substitution that is active now makes it."""
    active = Substitution.active()
    if active is None:
        return f
    f = f.with_inputs(*active.replaced(f.inputs()))
    if isinstance(f, AbstractStructuredMap):
        return f  # a map of given tensors captures none
    return _Inside(f, lambda: _Again(active))


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
    kept = {key: x for key, x in _cached_weights().items() if graph_edge(x) in graph.inner | graph.others}
    others |= {graph_edge(x) for x in kept.values()}
    if not others:
        return fz, graph.leaves, f
    if kept:
        f = _Inside(f, lambda: _caching(kept))
    seen = Seen(others)
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
