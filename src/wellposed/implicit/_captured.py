"""Tensors with a graph that f has captured: they are found, and others put in their place."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from wellposed._torch import Edge, graph_edge, without_modes
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


def kept_in_cache(f: AbstractMap, edges: set[Edge]) -> tuple[AbstractMap, set[Edge]]:
    """f with the weights among `edges` that `parametrize.cached()` keeps now, and their edges."""
    kept = {key: x for key, x in _cached_weights().items() if graph_edge(x) in edges}
    return (_Inside(f, lambda: _caching(kept)) if kept else f), {graph_edge(x) for x in kept.values()}
