"""What a function has captured, found in its graph; and other tensors put in the place of that.

A second derivative of an equilibrium needs every tensor that f depends on, by name: those that f was given are known, those
that it took from elsewhere (the parameters of a module, a matrix in a closure) are looked for here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from wellposed.implicit._uncompiled import uncompiled

__all__ = ["Substitution", "record"]

Edge = tuple[Any, int]  # a node of the graph and which of its outputs


def record(f: Callable[[Tensor], Tensor], z: Tensor, known: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """f(z) with its graph, and the tensors that f has captured.

    They are the leaves that the graph reaches other than through `known`, and, in the place of the leaves behind them, the
    tensors with a graph of their own that f was seen to use. (f is evaluated a second time to see those, if there are any.
    What a custom `autograd.Function` uses is not seen: the leaves behind it are taken.) A known tensor that
    is a leaf is among them too, since f may have captured something made of it.
    """
    since = torch._C._autograd._get_sequence_nr()
    fz = f(z)
    ends = {edge(x) for x in known if x.grad_fn is not None}
    leaves, others = _boundary(fz, ends, since)
    if not others:
        return fz, leaves
    seen = _Seen(others)
    with seen:
        again = uncompiled(lambda: f(z))
    leaves, _ = _boundary(again, ends | {edge(alias) for _, alias in seen.found.values()}, 0)
    return fz, leaves + [tensor for tensor, _ in seen.found.values()]


def edge(x: Tensor) -> Edge:
    """Where the cotangent of a tensor with a graph arrives."""
    return x.grad_fn, x.output_nr


def _boundary(fz: Tensor, ends: set[Edge], since: int) -> tuple[list[Tensor], set[Edge]]:
    """The leaves behind fz, and the edges to nodes older than `since`; nothing behind those or behind `ends` is looked at."""
    leaves: dict[int, Tensor] = {}
    others: set[Edge] = set()
    expanded = set()
    ahead: list[Edge] = [edge(fz)]
    while ahead:
        node, output = ahead.pop()
        if node is None or node in expanded or (node, output) in ends:
            continue
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            leaves[id(leaf)] = leaf
        elif node._sequence_nr() < since:
            others.add((node, output))
        else:
            expanded.add(node)
            ahead.extend(node.next_functions)
    return list(leaves.values()), others


class Substitution(TorchFunctionMode):
    """Inside, every function of torch gets other tensors in the place of given ones with a graph of their own."""

    def __init__(self, old: Sequence[Tensor], new: Sequence[Tensor]) -> None:
        super().__init__()
        self._new = {edge(x): y for x, y in zip(old, new, strict=True) if x.grad_fn is not None}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Tensor, self._replace, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _replace(self, x: Tensor) -> Tensor:
        return x if x.grad_fn is None else self._new.get(edge(x), x)


class _Seen(Substitution):
    """Notes the tensors at given edges as they are used, and puts aliases in their place."""

    def __init__(self, edges: set[Edge]) -> None:
        super().__init__((), ())
        self._edges = edges
        self.found: dict[Edge, tuple[Tensor, Tensor]] = {}

    def _replace(self, x: Tensor) -> Tensor:
        if x.grad_fn is None or edge(x) not in self._edges:
            return x
        if edge(x) not in self.found:
            self.found[edge(x)] = x, x.view_as(x)
        return self.found[edge(x)][1]
