"""Any Python function as a map of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from wellposed._tree import LOW_PRECISION, Layout, leaves, map_leaves
from wellposed.errors import InvalidArgument, InvalidType
from wellposed.linalg.jacobian import AbstractJacobian, Jacobian
from wellposed.solve._map import AbstractMap, StandingRows

__all__ = ["FunctionMap"]

T = TypeVar("T")


class FunctionMap(AbstractMap):
    """Any Python function of a state (and of batch-first arguments) as a map of rows.

    Rows can be taken in two ways. If `f` is row-wise and what it needs per sample comes through `args`, then `f` of some
    rows *is* some rows of `f`, and a sample that has finished really leaves the computation. If `f` has captured per-sample
    data, it can only be evaluated for the whole batch; finished samples then stand still in it. The first is tried; the second
    is done once f refuses some of the rows, or once an evaluation of the whole batch has shown another value for them.

    Args:
        f: `f(state, *args) -> state`.
        layout: The layout of the state.
        args: Structures of tensors; those whose first dimension is the batch go with their samples.
        low_precision: Whether f may return float16 or bfloat16 for a state of higher precision, as under autocast.
    """

    def __init__(
        self, f: Callable[..., Any], layout: Layout, args: tuple[Any, ...] = (), *, low_precision: bool = False
    ) -> None:
        self._f = f
        self._layout = layout
        self._args = args
        self._low_allowed = low_precision or layout.dtype in LOW_PRECISION
        self._low = False  # f accepts only the low-precision dtype of the state
        self._seen: tuple[Tensor, Tensor] | None = None  # the last (z, f(z)): where rows would stand still
        self._checked = False
        self.whole_only = False  # f of some rows is not some rows of f

    def __call__(self, z: Tensor, out: Tensor | None = None) -> Tensor:
        version = None if z.is_inference() else z._version
        value = self._evaluate(z)
        if version is not None and z._version != version:
            raise InvalidArgument("f changed its argument in place; it must return a new value and leave z as it is.")
        self._seen = (z, value)
        return value

    def tracked(self, z: Tensor) -> Tensor:
        return self._evaluate(z)

    def inputs(self) -> tuple[Tensor, ...]:
        return tuple(leaf for leaf in leaves(self._args) if isinstance(leaf, Tensor))

    def with_inputs(self, *inputs: Tensor) -> FunctionMap:
        remaining = iter(inputs)
        args = map_leaves(lambda leaf: next(remaining) if isinstance(leaf, Tensor) else leaf, self._args)
        other = FunctionMap(self._f, self._layout, args, low_precision=self._low_allowed)
        other._low, other._checked = self._low, self._checked
        return other

    def _evaluate(self, z: Tensor) -> Tensor:
        if self._layout.dtype in LOW_PRECISION and not self._checked:
            value = self._first_low_precision(z)
        else:
            value = self._call(z)
        problem = self._layout.check(value, z.shape[0])
        if problem is not None:
            raise InvalidArgument(f"f must keep the structure and shapes of the state: {problem}.")
        self._checked = True
        rows = self._layout.flatten(value)
        if rows.dtype != z.dtype:
            if rows.dtype not in LOW_PRECISION or not self._low_allowed:
                raise InvalidType(
                    f"f must keep the dtype of the state: expected {z.dtype}, got {rows.dtype}. "
                    "Convert the state or the parameters of f so that they agree."
                )
            rows = rows.to(z.dtype)
        return rows

    def _call(self, z: Tensor) -> Any:
        if self._low:
            z = z.to(self._layout.dtype)
        return self._f(self._layout.unflatten(z), *self._args)

    def _first_low_precision(self, z: Tensor) -> Any:
        """Prefers f in float32; a function with low-precision weights refuses that and gets its own dtype."""
        args = self._args
        with torch.enable_grad():  # first asked without a graph, but a later recording must reach the caller's tensors
            self._args = map_leaves(_to_float32, args)
        try:
            return self._call(z)
        except RuntimeError:
            self._args, self._low = args, True
            return self._call(z)

    def take(self, rows: Tensor) -> AbstractMap:
        if torch.equal(rows, torch.arange(self._layout.batch, device=rows.device)):
            return self
        return self.standing(rows) if self.whole_only else _Part(self, rows)

    def standing(self, rows: Tensor) -> StandingRows:
        """Some of the rows, with the others where they were evaluated last."""
        assert self._seen is not None
        return StandingRows(self, *self._seen, rows)

    def alone(self, rows: Tensor) -> FunctionMap:
        """f with the arguments of some of the rows."""
        args = _take_args(self._args, rows, self._layout.batch)
        part = FunctionMap(self._f, _with_batch(self._layout, rows.shape[0]), args, low_precision=self._low_allowed)
        part._low, part._checked = self._low, True
        return part

    def jacobian(self, z: Tensor) -> AbstractJacobian:
        jacobian = Jacobian(self._evaluate, z)
        self._seen = (z, jacobian.value)
        return jacobian

    def forget(self) -> None:
        self._seen = None


class _Part(AbstractMap):
    """Some rows of a function: f evaluated for them alone, or among the others if f does not allow that."""

    def __init__(self, whole: FunctionMap, rows: Tensor) -> None:
        self._whole, self._rows = whole, rows
        self._alone = whole.alone(rows)
        self._standing = whole.standing(rows)

    def __call__(self, z: Tensor, out: Tensor | None = None) -> Tensor:
        return self._chosen(lambda part: part(z))

    def tracked(self, z: Tensor) -> Tensor:
        return self._chosen(lambda part: part.tracked(z))

    def jacobian(self, z: Tensor) -> AbstractJacobian:
        return self._chosen(lambda part: part.jacobian(z))

    def _chosen(self, use: Callable[[AbstractMap], T]) -> T:
        if not self._whole.whole_only:
            try:
                return use(self._alone)
            except Exception:  # f was asked something that it never promised: if it has a fault, the next line shows it
                self._whole.whole_only = True
        return use(self._standing)

    def take(self, rows: Tensor) -> AbstractMap:
        return self._standing.take(rows) if self._whole.whole_only else _Part(self._whole, self._rows[rows])


def _to_float32(leaf: Any) -> Any:
    return leaf.float() if isinstance(leaf, Tensor) and leaf.dtype in LOW_PRECISION else leaf


def _take_args(args: tuple[Any, ...], rows: Tensor, batch: int) -> tuple[Any, ...]:
    def take(leaf: Any) -> Any:
        batched = isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == batch
        return leaf[rows] if batched else leaf

    return tuple(map_leaves(take, arg) for arg in args)


def _with_batch(layout: Layout, batch: int) -> Layout:
    return Layout(layout.template, layout.shapes, layout.sizes, batch, layout.dtype, layout.device)
