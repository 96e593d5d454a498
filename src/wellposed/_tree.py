"""States as structures of tensors, and as rows of one matrix.

A state is a tensor, or a tuple, list or dict (nested as you like) of tensors, batch first. Solvers see only the
matrix of its rows, (batch, features); `Layout` goes there and back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wellposed.errors import InvalidArgument, InvalidType

__all__ = ["Layout", "leaves", "map_leaves"]

LOW_PRECISION = (torch.float16, torch.bfloat16)


def leaves(tree: Any) -> list[Any]:
    """The leaves of a structure, in order (dicts in insertion order)."""
    if isinstance(tree, dict):
        return [leaf for value in tree.values() for leaf in leaves(value)]
    if isinstance(tree, (tuple, list)):
        return [leaf for value in tree for leaf in leaves(value)]
    return [tree]


def rebuild(tree: Any, new: Sequence[Any]) -> Any:
    """The structure of `tree` holding `new` leaves."""
    remaining = iter(new)
    return map_leaves(lambda _: next(remaining), tree)


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """The same structure with `function` applied to every leaf."""
    if isinstance(tree, dict):
        return {key: map_leaves(function, value) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_leaves(function, value) for value in tree))
    if isinstance(tree, (tuple, list)):
        return type(tree)(map_leaves(function, value) for value in tree)
    return function(tree)


def describe(tree: Any) -> str:
    """The structure and the shapes in it, for error messages."""
    if isinstance(tree, Tensor):
        return str(tuple(tree.shape))
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{key!r}: {describe(value)}" for key, value in tree.items()) + "}"
    if isinstance(tree, (tuple, list)):
        return type(tree).__name__ + "(" + ", ".join(describe(value) for value in tree) + ")"
    return type(tree).__name__


def _same_structure(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(_same_structure(a[k], b[k]) for k in a)
    if isinstance(a, (tuple, list)):
        return type(a) is type(b) and len(a) == len(b) and all(map(_same_structure, a, b))
    return not isinstance(b, (dict, tuple, list))


@dataclass(frozen=True)
class Layout:
    """How a state lies in the rows of a matrix.

    Attributes:
        template: The structure, with a shape (without batch) at each leaf.
        shapes: Trailing shape of each leaf.
        sizes: Number of features of each leaf.
        batch: Number of samples.
        dtype: Dtype of the state as the caller gave it.
        device: Its device.
    """

    template: Any
    shapes: tuple[torch.Size, ...]
    sizes: tuple[int, ...]
    batch: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, state: Any, name: str) -> Layout:
        """Reads the layout of a state; `name` is what error messages call it."""
        tensors = leaves(state)
        for leaf in tensors:
            if not isinstance(leaf, Tensor):
                raise InvalidType(
                    f"{name} must be a tensor, or a tuple, list or dict of tensors; found a {type(leaf).__name__} in it."
                )
            if not leaf.dtype.is_floating_point:
                raise InvalidType(
                    f"{name} must be real floating point; got {leaf.dtype}. Convert it, e.g. with .to(torch.float32)."
                )
            if leaf.dim() == 0:
                raise InvalidArgument(
                    f"{name} must be batch first, but one of its tensors has no dimension. "
                    "For a single sample give shape (1,) or (1, features)."
                )
        if not tensors:
            raise InvalidArgument(f"{name} holds no tensor; expected at least one.")
        first = tensors[0]
        for leaf in tensors[1:]:
            if leaf.shape[0] != first.shape[0] or leaf.dtype != first.dtype or leaf.device != first.device:
                raise InvalidArgument(
                    f"All tensors of {name} must share batch size, dtype and device: got {first.shape[0]}, {first.dtype}, "
                    f"{first.device} and {leaf.shape[0]}, {leaf.dtype}, {leaf.device}."
                )
        shapes = tuple(leaf.shape[1:] for leaf in tensors)
        return cls(
            template=rebuild(state, [_Shape(shape) for shape in shapes]),
            shapes=shapes,
            sizes=tuple(math.prod(shape) for shape in shapes),
            batch=first.shape[0],
            dtype=first.dtype,
            device=first.device,
        )

    @property
    def compute_dtype(self) -> torch.dtype:
        """float32 for float16 and bfloat16, which cannot resolve a tolerance; otherwise the state's own."""
        return torch.float32 if self.dtype in LOW_PRECISION else self.dtype

    def flatten(self, state: Any) -> Tensor:
        """(batch, features). A single tensor is viewed, not copied, where its strides allow."""
        rows = [leaf.reshape(leaf.shape[0], math.prod(leaf.shape[1:])) for leaf in leaves(state)]
        return rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)

    def unflatten(self, rows: Tensor) -> Any:
        """The state whose rows these are (any number of rows)."""
        if len(self.shapes) == 1:
            parts: Sequence[Tensor] = (rows,)
        else:
            parts = rows.split(self.sizes, dim=1)
        shaped = [part.reshape(part.shape[0], *shape) for part, shape in zip(parts, self.shapes, strict=True)]
        return rebuild(self.template, shaped)

    def check(self, state: Any, batch: int) -> str | None:
        """None if `state` fits this layout with `batch` samples; otherwise what was expected and seen."""
        if _same_structure(self.template, state):
            tensors = leaves(state)
            fits = all(
                isinstance(leaf, Tensor) and leaf.shape == (batch, *shape)
                for leaf, shape in zip(tensors, self.shapes, strict=True)
            )
            if fits:
                return None
        expected = describe(map_leaves(lambda leaf: torch.empty(batch, *leaf.shape, device="meta"), self.template))
        return f"expected {expected}, got {describe(state)}"


@dataclass(frozen=True)
class _Shape:
    """A trailing shape as one leaf (a bare tuple would be taken for a structure)."""

    shape: torch.Size
