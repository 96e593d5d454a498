"""States as structures of tensors, and as rows of one matrix: checks, norms and memory of rows.

A state is a tensor, or any structure of tensors that `torch.utils._pytree` knows: tuples, lists,
dicts, named tuples, registered dataclasses, outputs of Hugging Face models. The batch is first.
Solvers see only the matrix of its rows, (batch, features); `Layout` converts in both directions. A
complex state has its real and imaginary parts as real features: norms stay the same, and so do
gradients, since autograd gives a complex tensor the cotangent dL/d(real) + i dL/d(imaginary). Norms
of rows are numpy arrays on the host.
"""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wellposed._torch import pytree
from wellposed.errors import InvalidArgument, InvalidType

Array = np.ndarray[Any, Any]
#: Two evaluations of a row that differ by more roundings of its largest entry are not the same.
ROUNDINGS = 32.0
#: Dtypes that cannot resolve a tolerance; they are computed in float32.
LOW_PRECISION = (torch.float16, torch.bfloat16)
MOST_KEPT = 8  #: Buffers kept for the next solve. A solve uses four; a second solve inside a cell may use as many.
#: Complex dtypes and those of their parts.
REAL_PARTS = {torch.complex64: torch.float32, torch.complex128: torch.float64}
LEAF = pytree.tree_structure(0)  #: Of a single tensor, which torch would take ten microseconds to describe.
_local = threading.local()


def leaves(tree: Any) -> list[Any]:
    """The leaves of a structure, in order (dicts in insertion order)."""
    return [tree] if isinstance(tree, Tensor) else pytree.tree_leaves(tree)


def rebuild(tree: Any, new: Sequence[Any]) -> Any:
    """The structure of `tree` with `new` leaves."""
    return pytree.tree_unflatten(new, pytree.tree_structure(tree))


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """The same structure with `function` applied to every leaf."""
    return function(tree) if isinstance(tree, Tensor) else pytree.tree_map(function, tree)


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """The same structure with `function` applied to every tensor; other leaves stay."""
    return function(tree) if isinstance(tree, Tensor) else pytree.tree_map_only(Tensor, function, tree)


def describe(tree: Any, leaf: Callable[[Any], str] | None = None) -> str:
    """The structure, and its shapes or what `leaf` says of each leaf, for messages."""
    if leaf is not None and pytree.tree_is_leaf(tree):
        return leaf(tree)
    if isinstance(tree, Tensor):
        return str(tuple(tree.shape))
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{key!r}: {describe(value, leaf)}" for key, value in tree.items()) + "}"
    if isinstance(tree, (tuple, list)):
        return type(tree).__name__ + "(" + ", ".join(describe(value, leaf) for value in tree) + ")"
    parts = [] if pytree.tree_is_leaf(tree) else leaves(tree)
    return type(tree).__name__ + ("(" + ", ".join(describe(part, leaf) for part in parts) + ")" if parts else "")


@dataclass(frozen=True)
class Layout:
    """How a state lies in the rows of a matrix.

    Attributes:
        structure: The structure, as pytree describes it.
        shapes: Shape of each leaf without the batch.
        sizes: Number of real features of each leaf.
        batch: Number of samples.
        dtype: Dtype of the state that the caller gave.
        device: Its device.
    """

    structure: Any
    shapes: tuple[torch.Size, ...]
    sizes: tuple[int, ...]
    batch: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, state: Any, name: str) -> Layout:
        """Reads the layout of a state; `name` is its name in error messages."""
        tensors, structure = ([state], LEAF) if isinstance(state, Tensor) else pytree.tree_flatten(state)
        for leaf in tensors:
            if not isinstance(leaf, Tensor):
                raise InvalidType(
                    f"{name} must be a tensor, or a tuple, list or dict of tensors; found a {type(leaf).__name__} in it."
                )
            if not (leaf.dtype.is_floating_point or leaf.dtype in REAL_PARTS):
                raise InvalidType(
                    f"{name} must be floating point, real or complex; got {leaf.dtype}. Convert it, e.g. by .to(torch.float32)."
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
        sizes = tuple(math.prod(shape) * (2 if first.is_complex() else 1) for shape in shapes)
        return cls(structure, shapes, sizes, first.shape[0], first.dtype, first.device)

    def __reduce__(self) -> tuple[Any, ...]:
        example = pytree.tree_unflatten(list(range(len(self.sizes))), self.structure)  # torch warns if it copies a structure
        return _layout_like, (example, self.shapes, self.sizes, self.batch, self.dtype, self.device)

    def with_batch(self, batch: int) -> Layout:
        """The same layout for another number of samples."""
        return Layout(self.structure, self.shapes, self.sizes, batch, self.dtype, self.device)

    @property
    def is_real_tensor(self) -> bool:
        """Whether the state is one real tensor."""
        return self.structure.is_leaf() and not self.dtype.is_complex

    @property
    def is_matrix(self) -> bool:
        """Whether the state is a matrix already."""
        return self.is_real_tensor and len(self.shapes[0]) == 1

    @property
    def compute_dtype(self) -> torch.dtype:
        """That of the rows: float32 for low precision, that of its parts for a complex one."""
        return _compute_dtype(self.dtype)

    def flatten(self, state: Any) -> Tensor:
        """(batch, features). A single tensor is viewed, not copied, where its strides allow."""
        if isinstance(state, Tensor) and state.dim() == 2 and not self.dtype.is_complex:
            return state
        parts = [state] if isinstance(state, Tensor) else leaves(state)
        if self.dtype.is_complex:
            parts = [torch.view_as_real(leaf.resolve_conj()) for leaf in parts]
        rows = [leaf.reshape(leaf.shape[0], math.prod(leaf.shape[1:])) for leaf in parts]
        return rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)

    def unflatten(self, rows: Tensor) -> Any:
        """The state with these rows (any number of rows)."""
        if self.is_matrix:
            return rows
        parts: Sequence[Tensor] = (rows,) if len(self.shapes) == 1 else rows.split(self.sizes, dim=1)
        if self.dtype.is_complex:
            parts = [torch.view_as_complex(part.reshape(part.shape[0], part.shape[1] // 2, 2).contiguous()) for part in parts]
        shaped = [part.reshape(part.shape[0], *shape) for part, shape in zip(parts, self.shapes, strict=True)]
        return shaped[0] if self.structure.is_leaf() else self.structure.unflatten(shaped)

    def check(self, state: Any, batch: int) -> str | None:
        """None if `state` fits with `batch` samples; otherwise what was expected and seen."""
        if isinstance(state, Tensor) and self.structure.is_leaf() and state.shape == (batch, *self.shapes[0]):
            if state.is_complex() == self.dtype.is_complex:
                return None  # the usual case, at every evaluation of f
        try:
            parts = self.structure.flatten_up_to(state)
        except ValueError:
            parts = []
        sizes = [(batch, *shape) for shape in self.shapes]
        # flatten_up_to accepts a dict in another order, which `flatten` would mix up
        in_order = len(parts) == len(sizes) and all(map(operator.is_, parts, leaves(state)))
        if in_order and all(isinstance(part, Tensor) and part.shape == size for part, size in zip(parts, sizes, strict=True)):
            found = next((part.dtype for part in parts if part.is_complex() != self.dtype.is_complex), None)
            return None if found is None else f"expected entries of {self.dtype}, got {found}"
        expected = describe(self.structure.unflatten([torch.empty(size, device="meta") for size in sizes]))
        return f"expected {expected}, got {describe(state)}"


def _layout_like(example: Any, *rest: Any) -> Layout:
    """A layout from an example of its structure."""
    return Layout(pytree.tree_structure(example), *rest)


def check_features(owner: str, x: Any, features: int, dtype: torch.dtype) -> None:
    """An input must have shape (batch, features) and be computed in the dtype of the parameters."""
    if not isinstance(x, Tensor) or x.dim() != 2 or x.shape[1] != features:
        seen = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise InvalidArgument(f"{owner} expects x of shape (batch, {features}); got {seen}.")
    if x.is_complex() or _compute_dtype(x.dtype) != _compute_dtype(dtype):
        raise InvalidType(f"{owner} has {dtype} parameters and got x of {x.dtype}; convert one, e.g. x.to({dtype}).")


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for float16 and bfloat16, the dtype of the parts for a complex one, or itself."""
    return torch.float32 if dtype in LOW_PRECISION else REAL_PARTS.get(dtype, dtype)


def host_dtype(dtype: torch.dtype) -> Any:
    """The dtype of numpy."""
    return np.float64 if dtype == torch.float64 else np.float32


def to_device(numbers: Array, device: torch.device) -> Tensor:
    """A tensor of numbers of the host."""
    return torch.from_numpy(numbers) if device.type == "cpu" else torch.from_numpy(numbers).to(device)


def to_host(numbers: Tensor) -> Array:
    """Numbers of a tensor; on a processor they share its memory."""
    return numbers.cpu().numpy()


def measure(g: Tensor, fz: Tensor) -> tuple[Array, Array, bool]:
    """(rows,) |g| and |fz| on the host, by one transfer; whether all are ordinary numbers.

    Norms whose squares leave the dtype are measured by scaling: 1e-25 is not 0.
    """
    r, s = torch.linalg.vector_norm(g, dim=1), torch.linalg.vector_norm(fz, dim=1)
    r, s = (r.numpy(), s.numpy()) if r.device.type == "cpu" else torch.stack((r, s)).cpu().numpy()
    small = smallest_norm(g.dtype)
    if r.shape[0] == 0 or (r.min() > small and s.min() > small and r.max() < np.inf and s.max() < np.inf):
        return r, s, True
    rows = np.flatnonzero(~((s > small) & np.isfinite(r) & np.isfinite(s)))
    if rows.shape[0]:
        odd = to_device(rows, g.device)
        r[rows], s[rows] = to_host(scaled_norm(g[odd])), to_host(scaled_norm(fz[odd]))
    return r, s, False


@cache
def smallest_norm(dtype: torch.dtype) -> float:
    """Norms below have lost digits to underflow."""
    return float(torch.finfo(dtype).tiny) ** 0.5 * 1e3


def scaled_norm(v: Tensor) -> Tensor:
    """(batch,) norms of rows of any size: each is divided by its largest entry first."""
    largest = torch.linalg.vector_norm(v, torch.inf, dim=1) if v.shape[1] else v.new_zeros(v.shape[0])
    scale = torch.where((largest > 0) & largest.isfinite(), largest, torch.ones_like(largest))
    return torch.linalg.vector_norm(v / scale.unsqueeze(1), dim=1) * scale


def relative(g_norm: Tensor, f_norm: Tensor) -> Tensor:
    """|f(z) - z| / |f(z)|, 0 where both are 0."""
    return torch.where(g_norm == 0, g_norm, g_norm / f_norm)


def differs(a: Tensor, b: Tensor) -> Tensor:
    """(batch,) whether rows differ beyond rounding; False where b is not finite."""
    if b.shape[1] == 0:
        return torch.zeros(b.shape[0], dtype=torch.bool, device=b.device)
    if torch.equal(a, b):  # the usual case in one operation
        return torch.zeros(b.shape[0], dtype=torch.bool, device=b.device)
    scale = torch.where(b.isfinite(), b, 0.0).abs().amax(dim=1, keepdim=True)
    same = (a - b).abs() <= ROUNDINGS * torch.finfo(b.dtype).eps * scale
    return ~(same | ~b.isfinite()).all(dim=1)


def first_tensor(x: Any) -> Tensor:
    """The first tensor of a structure."""
    for leaf in leaves(x):
        if isinstance(leaf, Tensor):
            return leaf
    raise InvalidType(f"x must be a tensor or a structure of tensors, batch first; got {type(x).__name__}.")


def take_buffer(like: Tensor) -> Tensor:
    """A buffer of the shape, dtype and device of `like`, with arbitrary content.

    Fresh memory costs page faults, some per cent of a short solve. Buffers are kept for the next
    solve of the same thread: a few, of the size asked for last.
    """
    kept = _kept()
    for i, buffer in enumerate(kept):
        if buffer.shape == like.shape and buffer.dtype == like.dtype and buffer.device == like.device:
            return kept.pop(i)
    kept.clear()  # their size is no longer used
    return torch.empty(like.shape, dtype=like.dtype, device=like.device)


def give_buffer(buffer: Tensor) -> None:
    """Returns a buffer; one made in inference mode could not be written to outside."""
    kept = _kept()
    if buffer.device.type == "cpu" and not buffer.is_inference() and len(kept) < MOST_KEPT:
        kept.append(buffer)


def _kept() -> list[Tensor]:
    if not hasattr(_local, "kept"):
        _local.kept = []
    kept: list[Tensor] = _local.kept
    return kept
