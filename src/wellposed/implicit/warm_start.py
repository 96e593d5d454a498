"""Solves that start at the last answers of the same samples."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from wellposed._checks import check_positive_integer
from wellposed._torch import transforms_active
from wellposed._tree import Layout
from wellposed.errors import InvalidArgument, InvalidType
from wellposed.implicit.adjoint import AbstractPullback
from wellposed.implicit.gradient import AbstractGradient
from wellposed.implicit.implicit_gradient import ImplicitGradient
from wellposed.linalg.linear_solver import AbstractLinearSolver
from wellposed.solve._samples import Outcome
from wellposed.solve.solution import SolveOptions
from wellposed.solve.splitting import AbstractSplitting
from wellposed.status import Status

#: Statuses whose point is a good start; after another one the sample starts anew.
GOOD = (Status.CONVERGED, Status.MAX_STEPS)


class EquilibriumCache:
    r"""The last equilibrium and the last adjoint of each sample of a data set, by its index.

    Training changes parameters little from one epoch to the next, so the last equilibrium of a
    sample is near the next one, and so is its adjoint. Use one cache for each layer and data set:

        >>> import torch, wellposed as wp
        >>> layer, X = wp.EquilibriumLayer(wp.nn.DenseCell(4, 16)), torch.randn(100, 4)
        >>> cache = wp.nn.EquilibriumCache(num_samples=100)
        >>> for index in torch.arange(100).split(20):
        ...     layer(X[index], warm_start=cache[index]).sum().backward()
        >>> len(cache)
        100

    Only the starts differ: tolerances, residuals and statuses are those of any solve. A sample
    whose solve diverged is forgotten. The adjoint starts at the multiple of the last one with the
    least residual, which is never worse than zero; a solver of linear systems such as `GMRES` still
    starts at zero. Of a map with several equilibria the one near the last is found.

    Args:
        num_samples: Of the data set; an index is in 0, ..., num_samples - 1.
        max_bytes: Memory for equilibria and adjoints together. The samples that come first are
            stored until it is full; the others start as without a cache.
    """

    def __init__(self, num_samples: int, *, max_bytes: int = 2**30) -> None:
        check_positive_integer("EquilibriumCache", "num_samples", num_samples)
        check_positive_integer("EquilibriumCache", "max_bytes", max_bytes)
        self.num_samples, self.max_bytes = num_samples, max_bytes
        self.clear()

    def clear(self) -> None:
        """Forgets all samples, and the shape and dtype of their states."""
        with torch.inference_mode(False):  # what is made there cannot be changed later elsewhere
            self._places = torch.full((self.num_samples,), -1, dtype=torch.int64)  # the row of each sample, once it has one
            self._valid = torch.zeros(self.num_samples, dtype=torch.bool)
        self._layout: Layout | None = None
        self._equilibria = self._adjoints = torch.empty(0, 0)
        self._used = 0

    def __getitem__(self, index: Tensor | Sequence[int] | slice) -> WarmStart:
        """The warm start of a batch: its samples by their indices in the data set."""
        if isinstance(index, slice):
            index = range(self.num_samples)[index]
        try:
            indices = index if isinstance(index, Tensor) else torch.tensor([*map(operator.index, index)], dtype=torch.int64)
        except TypeError as error:
            raise InvalidType(
                "The index of a cache must have one integer for each sample of the batch; got "
                f"{index!r:.60}. For one sample give a list, e.g. cache[[0]]."
            ) from error
        if indices.dim() != 1 or indices.dtype not in (torch.int64, torch.int32):
            raise InvalidType(
                f"The index of a cache must have one integer for each sample of the batch; got shape {tuple(indices.shape)} of "
                f"{indices.dtype}."
            )
        wrong = (indices < 0) | (indices >= self.num_samples)
        if bool(wrong.any()):
            raise InvalidArgument(
                f"Index {int(indices[wrong][0])} is out of range of a cache of {self.num_samples} samples (0 to "
                f"{self.num_samples - 1}). If the data set has changed, make a new EquilibriumCache(num_samples=...)."
            )
        return WarmStart(self, indices.to("cpu", torch.int64))

    def __len__(self) -> int:
        """How many samples have a stored equilibrium."""
        return int(self._valid.sum())

    def __repr__(self) -> str:
        size = 2 * self._equilibria.numel() * self._equilibria.element_size() / 2**20
        return f"EquilibriumCache({len(self)} of {self.num_samples} samples stored, {size:.1f} MiB)"

    def _fit(self, layout: Layout, start: Tensor) -> None:
        """Makes room at the first batch; raises if a later one is of another kind."""
        if self._layout is None:
            features = start.numel() // max(layout.batch, 1)
            each = 2 * features * start.element_size()
            rows = min(self.num_samples, self.max_bytes // max(each, 1))
            if rows == 0:
                raise InvalidArgument(
                    f"EquilibriumCache has max_bytes={self.max_bytes}, less than the {each} that "
                    "equilibrium and adjoint of one sample take. Raise max_bytes."
                )
            self._layout = layout
            with torch.inference_mode(False):
                self._equilibria, self._adjoints = start.new_zeros(2, rows, features)  # an adjoint of 0 is not a start
        known = self._layout
        if (known.shapes, known.dtype, known.structure) != (layout.shapes, layout.dtype, layout.structure):
            raise InvalidArgument(
                f"The cache holds states of {_described(known)}, and this batch has {_described(layout)}. Make a new "
                "EquilibriumCache, or call clear() on this one."
            )


@dataclass(frozen=True)
class WarmStart:
    """The samples of one batch in a cache: where their solves start, and what is kept of them."""

    cache: EquilibriumCache
    index: Tensor

    def read(self, rows: Tensor, otherwise: Tensor) -> Tensor:
        """The rows of the stored samples, of the shape of `otherwise`, which the other ones get."""
        known = self.cache._valid[self.index]
        if not bool(known.any()):
            return otherwise
        found = rows[self.cache._places[self.index].clamp(min=0).to(rows.device)].to(otherwise.device)
        known = known.to(otherwise.device).unsqueeze(1)
        return torch.where(known, found, otherwise.reshape(found.shape)).reshape(otherwise.shape)

    def keep(self, outcome: Outcome) -> None:
        """Stores the equilibria of samples that have one, and forgets those that were lost."""
        cache, batch = self.cache, self.index.shape[0]
        codes = outcome.codes.expand(batch)  # a whole batch as one sample has one status
        good = torch.stack([codes == int(status) for status in GOOD]).any(0)
        new = self.index[good & (cache._places[self.index] < 0)].unique()[: cache._equilibria.shape[0] - cache._used]
        cache._places[new] = torch.arange(cache._used, cache._used + new.shape[0])
        cache._used += new.shape[0]
        cache._valid[self.index[~good]] = False
        cache._valid[self.index[good]] = cache._places[self.index[good]] >= 0
        self.write(cache._equilibria, outcome.value, good)

    def write(self, rows: Tensor, values: Tensor, good: Tensor) -> None:
        """Stores the values of good samples that have a place."""
        places = self.cache._places[self.index]
        stored = good & (places >= 0)
        values = values.detach().reshape(self.index.shape[0], -1)
        rows[places[stored].to(rows.device)] = values[stored.to(values.device)].to(rows.device)

    def gradient(self, gradient: AbstractGradient) -> AbstractGradient:
        """The gradient mode, with a warm start if it solves an adjoint system."""
        if not isinstance(gradient, ImplicitGradient):
            return gradient
        return _WarmGradient(**{part.name: getattr(gradient, part.name) for part in fields(ImplicitGradient)}, samples=self)


@dataclass(frozen=True)
class _WarmGradient(ImplicitGradient):
    """The exact gradient, whose adjoint starts at the last one of the same samples."""

    samples: WarmStart | None = None
    kept: list[bool] = field(default_factory=list)  # not empty once an adjoint of this pass is stored

    @property
    def cold(self) -> ImplicitGradient:
        return ImplicitGradient(self.linear_solver, self.rtol, self.max_steps)

    def solve(
        self, pullback: AbstractPullback, v: Tensor, forward: SolveOptions, start: Tensor | None = None, first: Any = None
    ) -> Tensor:
        assert self.samples is not None
        cache = self.samples.cache
        found = self.samples.read(cache._adjoints, torch.zeros_like(v))
        if not isinstance(self.linear_solver, AbstractLinearSolver) and bool(found.any()):
            start = found
            if not isinstance(self.linear_solver, AbstractSplitting):  # which iterates another map
                start, first = _best_multiple(pullback, pullback.rhs(v), start)
        u = super().solve(pullback, v, forward, start, first)
        if not self.kept:  # a second derivative solves for another cotangent
            self.kept.append(True)
            self.samples.write(cache._adjoints, u, u.reshape(self.samples.index.shape[0], -1).isfinite().all(1).cpu())
        return u


def _best_multiple(pullback: AbstractPullback, rhs: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """a u and rhs + A a u, with a of each row such that |rhs - (I - A) a u| is least."""
    Au = pullback.product(u)
    w = u - Au
    square = w.square().sum(1, keepdim=True)
    a = (rhs * w).sum(1, keepdim=True) / square
    a = torch.where(a.isfinite(), a, 0.0)
    return a * u, rhs + torch.where(a == 0, 0.0, a * Au)


def begin(warm_start: Any, start: Tensor, layout: Layout, groups: Tensor | None) -> Tensor:
    """The start of a solve with `warm_start`, which is checked."""
    if not isinstance(warm_start, WarmStart):
        hint = " Index it by the samples of the batch." if isinstance(warm_start, EquilibriumCache) else ""
        raise InvalidType(f"warm_start must be cache[index] of an EquilibriumCache; got {type(warm_start).__name__}.{hint}")
    if groups is not None:
        raise InvalidArgument(
            "warm_start is for samples that are rows, and groups has several rows in a sample; give z0 instead."
        )
    if transforms_active():
        raise InvalidArgument("warm_start keeps values, which transforms of torch.func hide; call the layer without it there.")
    if warm_start.index.shape[0] != layout.batch:
        raise InvalidArgument(
            f"warm_start has the indices of {warm_start.index.shape[0]} samples, and the batch has {layout.batch} rows."
        )
    warm_start.cache._fit(layout, start)
    return warm_start.read(warm_start.cache._equilibria, start)


def _described(layout: Layout) -> str:
    shapes = ", ".join(str(tuple(shape)) for shape in layout.shapes)
    return f"shape {shapes} and {layout.dtype}"
