"""The map whose fixed point is sought, seen as a function of rows.

Solvers know only `AbstractMap`: rows in, rows out, some rows taken, a Jacobian. `FunctionMap` makes one of any Python
function; a cell with structure (see `wellposed.nn`) supplies its own, with in-place products and a closed-form Jacobian.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from wellposed._tree import LOW_PRECISION, Layout, leaves, map_leaves
from wellposed.errors import InvalidArgument, InvalidType
from wellposed.linalg.jacobian import AbstractJacobian, Jacobian

__all__ = ["AbstractMap", "Among", "FunctionMap", "RowsCoupled", "StandingRows", "differs", "is_built_in"]

T = TypeVar("T")
#: Two evaluations of the same rows that differ by more than this many roundings of the row's largest entry are not the same.
ROUNDINGS = 32.0


def is_built_in(*objects: object) -> bool:
    """Whether the classes of all objects are those of this package: a subclass defined elsewhere is not."""
    return all(type(one).__module__.partition(".")[0] == "wellposed" for one in objects)


def differs(a: Tensor, b: Tensor) -> Tensor:
    """(batch,) whether rows that should be equal differ beyond rounding; where b is not finite nothing is said."""
    if b.shape[1] == 0:
        return torch.zeros(b.shape[0], dtype=torch.bool, device=b.device)
    scale = torch.where(b.isfinite(), b, 0.0).abs().amax(dim=1, keepdim=True)
    same = (a - b).abs() <= ROUNDINGS * torch.finfo(b.dtype).eps * scale
    return ~(same | ~b.isfinite()).all(dim=1)


class RowsCoupled(Exception):
    """Rows that stood still changed because others moved: the map is not row-wise. Caught by `_closing.py`.

    Attributes:
        value: (batch, features) what the samples have come to, and
        evaluations: the evaluations of f so far: both filled in by the loop.
    """

    value: Tensor
    evaluations: int = 0


class AbstractMap(abc.ABC):
    """A row-wise map: row i of the output depends on row i of the input alone, (batch, features) both."""

    #: Whether `out=` of `__call__` is really used; if not the loop keeps no spare buffers.
    writes_out: bool = False
    #: Whether f cannot turn finite numbers into NaN or infinity, short of growing for many steps: then the loop need not
    #: look at every step.
    steady: bool = False

    @property
    def built_in(self) -> bool:
        """Whether the map is known to be row-wise and deterministic, so that no evaluation need confirm an answer."""
        return False

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

    def among(self, value: Tensor, index: Tensor, active: Tensor) -> Among | None:
        """Some of the rows, evaluated among all the others; None for a map that does not only evaluate.

        Args:
            value: (batch, features) where the others are.
            index: (rows,) which rows. active: (rows,) which of them move; the rest stays at `value` too.
        """
        return Among(self, value, index, active)

    def forget(self) -> None:  # noqa: B027  # most maps keep nothing
        """Releases what the last evaluation left, so that keeping the map for a backward pass keeps no states."""


class Among(AbstractMap):
    """Some rows of a map, evaluated with all the others where these are: one evaluation measures both.

    Attributes:
        image: (batch, features) f of the whole batch at the last evaluation.
    """

    def __init__(self, whole: AbstractMap, value: Tensor, index: Tensor, active: Tensor) -> None:
        self._whole, self._value, self._index, self._active = whole, value, index, active
        self.image: Tensor | None = None

    def __call__(self, z: Tensor, out: Tensor | None = None) -> Tensor:
        self.image = self._whole(self._value.index_copy(0, self._index[self._active], z[self._active]))
        return self.image[self._index]

    def take(self, rows: Tensor) -> AbstractMap:
        return self._whole.take(self._index[rows])


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
        self.taken = False  # whether some of the rows were evaluated without the others
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
        whole.taken = True

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


class StandingRows(AbstractMap):
    """Some rows of a map that can only be evaluated for its whole batch; the other rows stand still.

    f of a row that stands still does not change, unless it depends on other rows: then `RowsCoupled` is raised.
    """

    def __init__(self, whole: FunctionMap, standing: Tensor, image: Tensor, rows: Tensor) -> None:
        self._whole = whole
        self._standing = torch.where(standing.isfinite(), standing, torch.zeros_like(standing))
        # what was NaN stands at another point now, and its image is not known
        self._image = torch.where(standing.isfinite().all(dim=1, keepdim=True), image, torch.nan)
        self._rows = rows
        self._idle = torch.ones(standing.shape[0], dtype=torch.bool, device=rows.device)
        self._idle[rows] = False

    def insert(self, z: Tensor) -> Tensor:
        """The whole state with these rows in it."""
        return self._standing.index_copy(0, self._rows, z)

    def __call__(self, z: Tensor, out: Tensor | None = None) -> Tensor:
        value = self._whole(self.insert(z))
        if bool((differs(value, self._image) & self._idle).any()):
            raise RowsCoupled
        return value[self._rows]

    def take(self, rows: Tensor) -> AbstractMap:
        return StandingRows(self._whole, self._standing, self._image, self._rows[rows])

    def tracked(self, z: Tensor) -> Tensor:
        return self._whole.tracked(self.insert(z))[self._rows]


def _to_float32(leaf: Any) -> Any:
    return leaf.float() if isinstance(leaf, Tensor) and leaf.dtype in LOW_PRECISION else leaf


def _take_args(args: tuple[Any, ...], rows: Tensor, batch: int) -> tuple[Any, ...]:
    def take(leaf: Any) -> Any:
        batched = isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == batch
        return leaf[rows] if batched else leaf

    return tuple(map_leaves(take, arg) for arg in args)


def _with_batch(layout: Layout, batch: int) -> Layout:
    return Layout(layout.template, layout.shapes, layout.sizes, batch, layout.dtype, layout.device)
