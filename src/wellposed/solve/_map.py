"""The map whose fixed point is sought, seen as a function of rows.

Solvers know only `AbstractMap`: rows in, rows out, some rows taken, a Jacobian. `FunctionMap` makes one of any Python
function; a cell with structure (see `wellposed.nn`) supplies its own, with in-place products and a closed-form Jacobian.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wellposed._tree import LOW_PRECISION, Layout, leaves, map_leaves
from wellposed.errors import InvalidArgument, InvalidType
from wellposed.linalg.jacobian import AbstractJacobian, Jacobian

__all__ = ["AbstractMap", "FunctionMap"]


class AbstractMap(abc.ABC):
    """A row-wise map: row i of the output depends on row i of the input alone, (batch, features) both."""

    #: Whether `out=` of `__call__` is really used; if not the loop keeps no spare buffers.
    writes_out: bool = False
    #: Whether f cannot turn finite numbers into NaN or infinity, short of growing for many steps: then the loop need not
    #: look at every step.
    steady: bool = False

    @abc.abstractmethod
    def __call__(self, z: Tensor, out: Tensor | None = None) -> Tensor:
        """f of every row; may write into `out`, a buffer of the same shape that nobody else reads."""

    def tracked(self, z: Tensor) -> Tensor:
        """f of every row, out of place, as autograd should see it. By default `f(z)`."""
        return self(z)

    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors, besides z, that f is known to depend on, in the form in which `tracked` uses them."""
        return ()

    def with_inputs(self, *inputs: Tensor) -> AbstractMap:
        """The same map with other tensors in the place of `inputs()`."""
        return self

    @abc.abstractmethod
    def take(self, rows: Tensor) -> AbstractMap:
        """The same map for some of the rows: (k,) indices into the present ones."""

    def jacobian(self, z: Tensor) -> AbstractJacobian:
        """df/dz at the rows of z, one block per row, as an operator; by automatic differentiation unless overridden."""
        return Jacobian(self.tracked, z)


class FunctionMap(AbstractMap):
    """Any Python function of a state (and of batch-first arguments) as a map of rows.

    Rows can be taken in two ways. If `f` is row-wise and what it needs per sample comes through `args`, then `f` of some
    rows *is* some rows of `f`, and a sample that has finished really leaves the computation. If `f` has captured per-sample
    data, it can only be evaluated for the whole batch; finished samples then stand still in it. Which of the two holds is
    not guessed: at the first `take` both are evaluated and compared.

    Args:
        f: `f(state, *args) -> state`.
        layout: The layout of the state.
        args: Structures of tensors; those whose first dimension is the batch go with their samples.
    """

    def __init__(self, f: Callable[..., Any], layout: Layout, args: tuple[Any, ...] = ()) -> None:
        self._f = f
        self._layout = layout
        self._args = args
        self._low = False  # f accepts only the low-precision dtype of the state
        self._seen: tuple[Tensor, Tensor] | None = None  # the last (z, f(z)): what a first `take` compares with
        self._row_wise: bool | None = None
        self._checked = False

    def __call__(self, z: Tensor, out: Tensor | None = None) -> Tensor:
        version = None if z.is_inference() else z._version
        value = self._evaluate(z)
        if version is not None and z._version != version:
            raise InvalidArgument("f changed its argument in place; it must return a new value and leave z as it is.")
        if self._row_wise is None:
            self._seen = (z, value)
        return value

    def tracked(self, z: Tensor) -> Tensor:
        return self._evaluate(z)

    def inputs(self) -> tuple[Tensor, ...]:
        return tuple(leaf for leaf in leaves(self._args) if isinstance(leaf, Tensor))

    def with_inputs(self, *inputs: Tensor) -> FunctionMap:
        remaining = iter(inputs)
        args = map_leaves(lambda leaf: next(remaining) if isinstance(leaf, Tensor) else leaf, self._args)
        other = FunctionMap(self._f, self._layout, args)
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
            if rows.dtype not in LOW_PRECISION:
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
            return self  # and nothing could be learned from comparing
        if self._row_wise is None:
            self._row_wise = self._is_row_wise(rows)
        if not self._row_wise:
            assert self._seen is not None
            return _StandingRows(self, self._seen[0], rows)
        return self._taken(rows)

    def _taken(self, rows: Tensor) -> FunctionMap:
        batch = self._layout.batch
        part = FunctionMap(self._f, self._layout, _take_args(self._args, rows, batch))
        part._layout = _with_batch(self._layout, rows.shape[0])
        part._low, part._row_wise, part._checked = self._low, True, True
        return part

    def _is_row_wise(self, rows: Tensor) -> bool:
        if self._seen is None:
            return False
        z, value = self._seen
        try:
            part = self._taken(rows)._evaluate(z[rows])
        except Exception:  # f was asked something it never promised; whatever it says, the answer is no
            return False
        whole = value[rows]
        scale = whole.abs().amax(dim=1, keepdim=True)
        # Products of another batch size differ by rounding only; 100 eps of the row's largest entry is ample for that
        # and far below what a wrong sample would show.
        tolerance = 1e2 * torch.finfo(whole.dtype).eps * scale
        return bool(((part - whole).abs() <= tolerance).logical_or(~whole.isfinite()).all())

    def jacobian(self, z: Tensor) -> AbstractJacobian:
        jacobian = Jacobian(self._evaluate, z)
        if self._row_wise is None:
            self._seen = (z, jacobian.value)
        return jacobian

    def forget(self) -> None:
        """Lets go of the last evaluation, so that keeping the map for a backward pass keeps no states."""
        if self._row_wise is None:
            self._seen = None


class _StandingRows(AbstractMap):
    """Some rows of a map that can only be evaluated for its whole batch; the other rows stand still."""

    def __init__(self, whole: FunctionMap, standing: Tensor, rows: Tensor) -> None:
        self._whole = whole
        self._standing = torch.where(standing.isfinite(), standing, torch.zeros_like(standing))
        self._rows = rows

    def _insert(self, z: Tensor) -> Tensor:
        return self._standing.index_copy(0, self._rows, z)

    def __call__(self, z: Tensor, out: Tensor | None = None) -> Tensor:
        return self._whole(self._insert(z))[self._rows]

    def take(self, rows: Tensor) -> AbstractMap:
        return _StandingRows(self._whole, self._standing, self._rows[rows])

    def tracked(self, z: Tensor) -> Tensor:
        return self._whole.tracked(self._insert(z))[self._rows]


def _to_float32(leaf: Any) -> Any:
    return leaf.float() if isinstance(leaf, Tensor) and leaf.dtype in LOW_PRECISION else leaf


def _take_args(args: tuple[Any, ...], rows: Tensor, batch: int) -> tuple[Any, ...]:
    def take(leaf: Any) -> Any:
        batched = isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == batch
        return leaf[rows] if batched else leaf

    return tuple(map_leaves(take, arg) for arg in args)


def _with_batch(layout: Layout, batch: int) -> Layout:
    return Layout(layout.template, layout.shapes, layout.sizes, batch, layout.dtype, layout.device)
