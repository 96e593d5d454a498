r"""A cell as a list of elementary steps: linear, bilinear, elementwise, normalising.

Each step is a function in exact arithmetic. `_recording` makes the list; a certificate interprets
it: see `_balls` (boxes around a point) and `_composition` (all points at once).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from wellposed.certify._functions import Function

V = TypeVar("V")


class TapeRefused(Exception):
    """Why a cell cannot be written as a list of steps, in a sentence."""


def cause(error: Exception) -> str:
    """Its type, and the first line of what it says."""
    first = str(error).strip().splitlines()
    return f"{type(error).__name__}: {first[0]}" if first else type(error).__name__


@dataclass(frozen=True, eq=False)
class Node:
    """One step.

    Attributes:
        kind: "state" (z), "data" (part of x), "constant", "linear", "bilinear", "function",
            "normalise", "computed" (of x by an operation that is not known, as it was rounded).
        shape: Of the result.
        parents: The steps that it takes.
        apply: The step, in float64: of one tensor for each parent.
        absolute: Of a linear step, the same with the absolute values of its coefficients.
        terms: How many numbers are added up in an entry of a linear or bilinear step; 0 if nothing
            is rounded.
        name: The operation, for messages and for norms.
        function: Of an elementwise step.
        value: Of a constant, of data and of what was computed.
        epsilon: Of "normalise": y = (v - mean v)/sqrt(var v + epsilon) over the last dimension.
        of_z, of_x: Whether it depends on z, on x.
    """

    kind: str
    shape: torch.Size
    parents: tuple[Node, ...] = ()
    apply: Callable[..., Tensor] | None = None
    absolute: Callable[..., Tensor] | None = None
    terms: int = 0
    name: str = ""
    function: Function | None = None
    value: Tensor | None = None
    epsilon: float = 0.0
    of_z: bool = False
    of_x: bool = False


@dataclass(frozen=True)
class Tape:
    """The steps of a cell, in order.

    Attributes:
        steps: All of them; the first is z.
        result: The last.
        reads_x: Whether a decision was taken by the values of x, so that the list is about this x.
        computed: Operations that are not known, of parameters and of x alone: their results are
            taken as they were rounded.
        hides: Whether a part that depends on z, or may, is hidden from PyTorch's derivatives (by
            detach, no_grad), so that those of the list may be others.
    """

    steps: tuple[Node, ...]
    result: Node
    reads_x: bool
    computed: tuple[str, ...]
    hides: bool = False

    def run(self, domain: Domain[V]) -> V:
        """The result, interpreted."""
        values: dict[int, V] = {}
        for step in self.steps:
            values[id(step)] = domain.interpret(step, tuple(values[id(parent)] for parent in step.parents))
        return values[id(self.result)]


class Domain(Protocol[V]):
    """What a step means."""

    def interpret(self, step: Node, parents: tuple[V, ...]) -> V:
        """The value of a step from those of its parents."""
