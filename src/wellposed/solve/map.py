"""The map whose fixed point is sought, as a function of rows, and any Python function as one."""

from __future__ import annotations

import abc
from collections.abc import Callable
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from wellposed._torch import counted, relative_cost
from wellposed._tree import LOW_PRECISION, Array, Layout, differs, leaves, map_tensors
from wellposed.errors import InvalidArgument, InvalidType
from wellposed.linalg.jacobian import AbstractJacobian, Jacobian, ProductJacobian
from wellposed.solve._graph_data import take_nodes

T = TypeVar("T")
OPERATIONS, PASSES = 20, 24  #: Operations, and passes over the state, that take rows out of the batch of a layer.


class AbstractMap(abc.ABC):
    """A row-wise map of (batch, features): row i of f(z) depends on row i of z alone."""

    writes_out: bool = False  #: Whether `out=` of `__call__` is used; if not the loop keeps no spare buffers.
    leaves_at_once: bool = True  #: Whether finished samples take part in no further evaluation: `AbstractSolver.takes_out`.
    strides: bool = False  #: Whether a sample may take some steps too many if that saves measurements.
    is_affine: bool = False  #: Whether it is known to be z -> A z + b: then one step of Newton's method is exact.
    repeats: bool = False  #: Whether it is known to give the same value at the same point unless it draws random numbers.
    fresh: bool = True  #: Whether no earlier solve has shown that it draws no numbers from generators outside of torch.
    regroups: bool = False  #: Whether its rows are not those of the caller, which `rows` gives.
    cost: tuple[float, int] | None = None  #: Of an evaluation per row (`wellposed._torch.counted`), and its features.
    plain_factor: Array | None = None  #: `Outcome.plain_factor` of an earlier solve with its Jacobian.
    idle_part: float = 0.0  #: What `take` costs beyond copies, in evaluations: as large a part of the rows must be idle.

    @property
    def built_in(self) -> bool:
        """Whether the map is known to be row-wise and deterministic, so that answers hold."""
        return False

    @abc.abstractmethod
    def __call__(self, z: Tensor, out: Tensor | None = None) -> Tensor:
        """f of every row; may write into `out`, an unused buffer of the same shape."""

    def tracked(self, z: Tensor) -> Tensor:
        """f of every row, out of place, for autograd. By default `f(z)`."""
        return self(z)

    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors, besides z, that f is known to depend on, as `tracked` uses them."""
        return ()

    def with_inputs(self, *inputs: Tensor) -> AbstractMap:
        """The same map with other tensors in the place of `inputs()`."""
        return self

    @abc.abstractmethod
    def take(self, rows: Tensor) -> AbstractMap:
        """The same map for some of the rows: (k,) indices into the present ones."""

    def jacobian(self, z: Tensor) -> AbstractJacobian:
        """df/dz at the rows of z, one block per row; by autograd unless overridden."""
        return Jacobian(self.tracked, z)

    def rows(self, z: Tensor) -> Tensor:
        """(rows, features) of the caller, if the rows of z are not those already."""
        return z

    def forget(self) -> None:  # noqa: B027  # most maps keep nothing
        """Releases the last states, before the map is kept for a backward pass."""


class RowsCoupled(Exception):
    """Rows that stood still changed because others moved: the map is not row-wise.

    The loop fills in the points and the evaluations so far; a solver those `within` the step.
    """

    value: Tensor  # (batch, features)
    evaluations: int = 0
    within: int = 0


class StandingRows(AbstractMap):
    """Some rows of a map; the others stand still in its batch, or `RowsCoupled` is raised.

    Args:
        whole: The map.
        standing: (batch, features) where rows stand still. image: (batch, features) f there.
        rows: (k,) the rows that move.
    """

    def __init__(self, whole: AbstractMap, standing: Tensor, image: Tensor, rows: Tensor) -> None:
        self._whole, self._standing, self._image, self._rows = whole, standing, image, rows
        if not bool(standing.sum().isfinite()):  # a row with NaN stands at another point now, and its image is not known
            self._standing = torch.where(standing.isfinite(), standing, 0.0)
            self._image = torch.where(standing.isfinite().all(dim=1, keepdim=True), image, torch.nan)
        idle = torch.ones(standing.shape[0], dtype=torch.bool, device=rows.device).index_fill_(0, rows, False)
        self._idle = idle.nonzero().squeeze(1)

    def _among(self, z: Tensor) -> Tensor:
        return self._standing.index_copy(0, self._rows, z)

    def __call__(self, z: Tensor, out: Tensor | None = None) -> Tensor:
        value = self._whole(self._among(z))
        if bool(differs(value.index_select(0, self._idle), self._image.index_select(0, self._idle)).any()):
            raise RowsCoupled
        return value[self._rows]

    def take(self, rows: Tensor) -> AbstractMap:
        return StandingRows(self._whole, self._standing, self._image, self._rows[rows])

    def tracked(self, z: Tensor) -> Tensor:
        return self._whole.tracked(self._among(z))[self._rows]

    def jacobian(self, z: Tensor) -> AbstractJacobian:
        whole, rows = self._whole.jacobian(self._among(z)), self._rows

        def among_zeros(u: Tensor) -> Tensor:
            return u.new_zeros(whole.shape).index_copy_(0, rows, u)

        mv, rmv = (lambda u: whole.mv(among_zeros(u))[rows]), (lambda u: whole.rmv(among_zeros(u))[rows])
        return ProductJacobian(z, mv, rmv, value=None if whole.value is None else whole.value[rows], setup=whole.setup)


class FunctionMap(AbstractMap):
    """Any Python function of a state (and of batch-first arguments) as a map of rows.

    If `f` is row-wise and gets its per-sample data through `args`, finished samples leave. If not,
    f fails for some rows, or rows that stand still change: then finished samples stand still.

    Args:
        f: `f(state, *args) -> state`. layout: That of the state.
        args: Structures of tensors; those whose first dimension is the batch follow their samples.
        low_precision: Whether f may return float16 or bfloat16 for float32, as under autocast.
        costs: Where the counted cost is kept for later solves, by shapes and dtype: it `strides`.
    """

    def __init__(
        self,
        f: Callable[..., Any],
        layout: Layout,
        args: tuple[Any, ...] = (),
        *,
        low_precision: bool = False,
        costs: dict[Any, float] | None = None,
    ) -> None:
        self._f, self._layout, self._args = f, layout, args
        self._low_allowed, self._checked = low_precision or layout.dtype in LOW_PRECISION, False
        self._low = self._simple = False  # f accepts only low precision; f was seen to take and give one real tensor
        self._seen: tuple[Tensor, Tensor] | None = None  # the last (z, f(z)): where rows would stand still
        self.whole_only = False  # f of some rows is not some rows of f
        self.graphs = False  # rows are nodes, and arguments follow them: see `take_nodes`
        self.strides, self._key = costs is not None, (layout.shapes, layout.dtype)
        self.costs = {} if costs is None else costs
        self.fresh = self.uncounted = self._key not in self.costs
        self.watched = not self.strides  # f of rows that stood still was compared, or need not be

    @property
    def cost(self) -> tuple[float, int] | None:  # type: ignore[override]  # read only here
        return None if (cost := self.costs.get(self._key)) is None else (cost, sum(self._layout.sizes))

    @property
    def idle_part(self) -> float:  # type: ignore[override]  # read only here
        cost, batch = self.cost if self.strides else None, self._layout.batch
        return 0.0 if cost is None else relative_cost(OPERATIONS, PASSES * cost[1], cost[0], batch)

    def __call__(self, z: Tensor, out: Tensor | None = None) -> Tensor:
        version = None if z.is_inference() else z._version
        if not self.uncounted:
            value = self.tracked(z)
        else:
            value, self.costs[self._key] = counted(self.tracked, z, self.inputs())
            self.uncounted = False
        if version is not None and z._version != version:
            raise InvalidArgument("f changed its argument in place; it must return a new value and leave z unchanged.")
        self._seen = (z, value)
        return value

    def tracked(self, z: Tensor) -> Tensor:
        if self._simple:  # the usual case
            given = z if self._layout.is_matrix else z.reshape(z.shape[:1] + self._layout.shapes[0])
            value = self._f(given, *self._args)
            if isinstance(value, Tensor) and value.shape == given.shape and value.dtype == z.dtype:
                return value if given is z else value.reshape(z.shape)
        else:
            first_low = not self._checked and self._layout.dtype in LOW_PRECISION
            value = self._first_low_precision(z) if first_low else self._call(z)
        problem = self._layout.check(value, z.shape[0])
        if problem is not None:
            advice = "If what f returns is right, give a start z0 like it; or, for one tensor, its state_shape to the layer."
            raise InvalidArgument(f"f must keep the structure and shapes of the state: {problem}. {advice}")
        self._checked, self._simple = True, self._layout.is_real_tensor and not self._low
        rows = self._layout.flatten(value)
        if rows.dtype != z.dtype:
            if rows.dtype not in LOW_PRECISION or not self._low_allowed:
                raise InvalidType(
                    f"f must keep the dtype of the state: expected {z.dtype}, got {rows.dtype}. "
                    "Convert the state or the parameters of f so that they agree."
                )
            rows = rows.to(z.dtype)
        return rows

    def inputs(self) -> tuple[Tensor, ...]:
        return tuple(leaf for leaf in leaves(self._args) if isinstance(leaf, Tensor))

    def with_inputs(self, *inputs: Tensor) -> FunctionMap:
        remaining = iter(inputs)
        return self._like(self._layout, map_tensors(lambda leaf: next(remaining), self._args), self._checked)

    def _like(self, layout: Layout, args: tuple[Any, ...], checked: bool) -> FunctionMap:
        other = FunctionMap(self._f, layout, args, low_precision=self._low_allowed, costs=self.costs)
        other._low, other._checked, other._simple, other.graphs = self._low, checked, checked and self._simple, self.graphs
        return other

    def _call(self, z: Tensor) -> Any:
        return self._f(self._layout.unflatten(z.to(self._layout.dtype) if self._low else z), *self._args)

    def _first_low_precision(self, z: Tensor) -> Any:
        """Tries f in float32; if that raises, f gets its own dtype."""
        args = self._args
        with torch.enable_grad():  # called without a graph here, but a later recording must reach the caller's tensors
            self._args = map_tensors(lambda leaf: leaf.float() if leaf.dtype in LOW_PRECISION else leaf, args)
        try:
            return self._call(z)
        except RuntimeError:
            self._args, self._low = args, True
            return self._call(z)

    def take(self, rows: Tensor) -> AbstractMap:
        batch = self._layout.batch
        if rows.shape[0] == batch and torch.equal(rows, torch.arange(batch, device=rows.device)):
            return self
        return self.part(rows)

    def part(self, rows: Tensor) -> AbstractMap:  # of which f need not be able to evaluate a part
        assert self._seen is not None
        part = _Part(self, rows, self._seen)
        return part.standing if self.whole_only else part

    def alone(self, rows: Tensor) -> FunctionMap:
        """f with the arguments of some of the rows."""
        batch = self._layout.batch

        def take(leaf: Tensor) -> Tensor:
            return leaf.index_select(0, rows) if leaf.dim() > 0 and leaf.shape[0] == batch else leaf

        args = take_nodes(self._args, rows, batch) if self.graphs else tuple(map_tensors(take, part) for part in self._args)
        return self._like(self._layout.with_batch(rows.shape[0]), args, True)

    def jacobian(self, z: Tensor) -> AbstractJacobian:
        self._seen = (z, (jacobian := Jacobian(self.tracked, z)).value)
        return jacobian

    def repeats_itself(self) -> bool:  # at its last point
        return self._seen is not None and not bool(differs(self.tracked(self._seen[0]), self._seen[1]).any())

    def forget(self) -> None:
        self._seen = None


class _Part(AbstractMap):
    """Some rows of a function: f evaluated for them alone, or among the others."""

    def __init__(self, whole: FunctionMap, rows: Tensor, seen: tuple[Tensor, Tensor]) -> None:
        self._whole, self._rows, self._seen, self._alone = whole, rows, seen, whole.alone(rows)

    @cached_property
    def standing(self) -> StandingRows:  # with the others at the point where they were evaluated last
        return StandingRows(self._whole, *self._seen, self._rows)

    def __call__(self, z: Tensor, out: Tensor | None = None) -> Tensor:
        if not self._whole.watched:  # once a solve, so that coupled rows are found early
            self._whole.watched = True
            try:
                return self.standing(z)
            except RowsCoupled as found:
                if self._whole.repeats_itself():  # else it changes by itself, which is found at the end
                    found.within += 1
                    raise
        return self._chosen(lambda part: part(z))

    def tracked(self, z: Tensor) -> Tensor:
        return self._chosen(lambda part: part.tracked(z))

    def jacobian(self, z: Tensor) -> AbstractJacobian:
        return self._chosen(lambda part: part.jacobian(z))

    def _chosen(self, use: Callable[[AbstractMap], T]) -> T:
        if not self._whole.whole_only:
            try:
                return use(self._alone)
            except Exception:  # f need not accept some of the rows: if it has a fault, the next line shows it
                self._whole.whole_only = True
        return use(self.standing)

    def take(self, rows: Tensor) -> AbstractMap:
        return self.standing.take(rows) if self._whole.whole_only else self._whole.part(self._rows[rows])
