"""Losses on lines and grids of parameters, with equilibria that are checked at every point."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from wellposed._checks import check_positive_integer
from wellposed._progress import progress_display
from wellposed._tree import leaves
from wellposed.errors import InvalidArgument, InvalidType
from wellposed.landscape._model import check_rows, move, preserved, trained
from wellposed.landscape._point import Checks, PointLoss
from wellposed.landscape.directions import Direction, check_direction, filter_normalized, random_direction
from wellposed.landscape.record import Surface


def surface(
    model: nn.Module,
    loss: Callable[[Any, Any], Tensor],
    X: Tensor,
    y: Any,
    *,
    directions: Sequence[Direction] | None = None,
    num: int | tuple[int, ...] = 51,
    radius: float | tuple[float, ...] = 1.0,
    warm_start: bool = True,
    num_starts: int = 1,
    probes: int | None = None,
    agreement: float | None = None,
    batch_size: int | None = None,
    generator: torch.Generator | None = None,
    file: str | os.PathLike[str] | None = None,
    save_every: float = 30.0,
    progress: bool | Callable[[int, int], None] = False,
) -> Surface:
    r"""The loss at theta + a d_1 (+ b d_2) for a, b on a grid [li2018], for any module and loss.

        >>> import torch, wellposed as wp
        >>> model = wp.GaussianDEQ(3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        >>> X, y = torch.eye(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
        >>> wp.landscape.surface(model, torch.nn.functional.mse_loss, X, y, num=5, radius=0.2).counts()
        {'VALID': 25}

    Where the model has equilibria (an `EquilibriumLayer` anywhere in it), each point is solved from
    an extrapolation of the equilibria of its neighbours. A point where a solve failed, or where
    another start leads to another equilibrium, has the value NaN and its reason in `status`.
    Uniqueness is proved where the model can prove it (contraction, monotone); elsewhere
    `num_starts` random starts of the size of the equilibrium are tried, which can refute it but not
    prove it. Where the bound of a network that needs a proof (`on_ill_posed`) reaches 1, the same
    is tried, and a point that passes has its value and the status NOT_PROVED.

    The model is evaluated in evaluation mode, without a graph. Its state is restored afterwards,
    also after an exception or Ctrl-C.

    Args:
        model: Any module; the parameters that require a gradient move.
        loss: `loss(model(X), y)`, one number.
        X, y: All the data, (n, ...); the same at every point.
        directions: One or two, see `random_direction`, `filter_normalized`, `path_directions`,
            `hessian_directions`; two random filter-normalized ones if not given.
        num, radius: Points along each direction; coordinates go from -radius to radius.
        warm_start: Whether to start near the equilibria of the neighbours. Values agree with those
            from zero to the tolerance of the layers.
        num_starts: Random starts against which every equilibrium is checked; with 0 the status is
            UNCHECKED.
        probes: How many samples to check at each point, drawn anew, besides those that failed at an
            earlier point; None checks all. Only all samples find a single bad one at once.
        agreement: Relative distance up to which two results are one equilibrium; None takes the
            root of the layer's tolerance.
        batch_size: Samples a forward pass; None takes all together.
        generator: Of the directions, starts and probes; by default a new one with seed 0.
        file: An .npz file with the record so far: points that are in it are not evaluated again.
        save_every: Seconds between writes of `file`; it is also written at the end and on Ctrl-C.
        progress: True for a progress display, or a function of (points done, points in all).
    """
    parameters = trained(model)
    generator = torch.Generator().manual_seed(0) if generator is None else generator
    if directions is None:
        directions = [filter_normalized(model, random_direction(model, generator=generator)) for _ in range(2)]
    directions = _checked_directions(directions, model)
    checks = Checks(warm_start, num_starts, probes, agreement, batch_size)
    if not callable(loss):
        raise InvalidType(f"loss must be a function of (prediction, y); got {type(loss).__name__}.")
    if not isinstance(X, Tensor) or X.dim() == 0 or len(X) == 0:
        seen = tuple(X.shape) if isinstance(X, Tensor) else type(X).__name__
        raise InvalidType(
            f"X must be a tensor with one row for each sample, at least one; got {seen}. Wrap a model of other inputs."
        )
    check_rows(X, y)
    seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
    record = _new(len(directions), num, radius)
    record.info = _info(model, loss, X, y, directions, checks, seed)
    if file is not None and Path(file).exists():
        record = _resumed(record, file)
    origin = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    point = PointLoss(model, loss, X, y, checks=checks, shape=record.values.shape, seed=seed)
    began = saved = time.monotonic()
    before = record.seconds
    with _reporting(progress) as report, preserved(model), point.equilibria.watched():
        try:
            for done, index in enumerate(_snake(record.values.shape)):
                if record.status[index] == 0:
                    steps = [(float(axis[i]), d) for axis, i, d in zip(record.coordinates, index, directions, strict=True)]
                    move(parameters, origin, steps)
                    measured = point(index)
                    record.values[index], record.num_steps[index] = measured.value, measured.num_steps
                    record.failed[index] = measured.failed
                    record.status[index] = measured.status  # last: without it the point counts as not evaluated
                record.seconds = before + time.monotonic() - began
                if file is not None and time.monotonic() - saved > save_every:
                    record.save(file)
                    saved = time.monotonic()
                report(done + 1, record.values.size)
        finally:
            if file is not None:
                record.save(file)
    return record


@contextmanager
def _reporting(progress: bool | Callable[[int, int], None]) -> Iterator[Callable[[int, int], None]]:
    """What to call with the points done and all points."""
    if not isinstance(progress, bool):
        if not callable(progress):
            raise InvalidType(f"progress must be True, False or a function of (done, total); got {progress!r}.")
        yield progress
        return
    with progress_display("landscape", show=progress, bar="{done:g}/{total:g}") as display:
        yield lambda done, total: display.update(done, total=total)


def _snake(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The points so that each is a neighbour of the one before."""
    if len(shape) == 1:
        yield from ((i,) for i in range(shape[0]))
        return
    for i in range(shape[0]):
        for j in range(shape[1]) if i % 2 == 0 else range(shape[1] - 1, -1, -1):
            yield i, j


def _new(dimensions: int, num: Any, radius: Any) -> Surface:
    counts = num if isinstance(num, tuple) else (num,) * dimensions
    radii = radius if isinstance(radius, tuple) else (radius,) * dimensions
    if len(counts) != dimensions or len(radii) != dimensions:
        raise InvalidArgument(
            f"num={num!r} and radius={radius!r} must fit the {dimensions} directions: one number, or one each."
        )
    for count, extent in zip(counts, radii, strict=True):
        check_positive_integer("surface", "num", count)
        if isinstance(extent, bool) or not isinstance(extent, (int, float)) or not 0 < extent < float("inf"):
            raise InvalidArgument(f"The 'radius' parameter of surface must be positive and finite. Got {radius!r} instead.")
    axes = tuple(np.linspace(-r, r, k) if k > 1 else np.zeros(1) for k, r in zip(counts, radii, strict=True))
    shape = tuple(counts)
    return Surface(axes, np.full(shape, np.nan), np.zeros(shape, np.int8), np.full(shape, np.nan), np.full(shape, np.nan))


def _checked_directions(directions: Any, model: nn.Module) -> list[Direction]:
    if isinstance(directions, dict) or not isinstance(directions, Sequence) or len(directions) not in (1, 2):
        seen = f"{len(directions)}" if isinstance(directions, (list, tuple)) else type(directions).__name__
        raise InvalidArgument(f"directions must be a list of one or two directions; got {seen}.")
    for direction in directions:
        check_direction(model, direction)
    return list(directions)


def _info(model: nn.Module, loss: Any, X: Any, y: Any, directions: Any, checks: Checks, seed: int) -> dict[str, Any]:
    """What must be the same for a record to be continued."""
    options = asdict(checks)
    del options["batch_size"]  # values do not depend on it
    return {
        "model": type(model).__name__,
        "loss": getattr(loss, "__qualname__", type(loss).__qualname__),
        "samples": len(X),
        **options,
        "seed": seed,
        "digest": _digest(list(model.state_dict().values()), X, y, [list(d.values()) for d in directions]),
    }


def _digest(*structures: Any) -> str:
    total = hashlib.sha256()
    for leaf in leaves(structures):
        if isinstance(leaf, Tensor):
            value = leaf.detach().cpu().contiguous()
            total.update(str((value.dtype, tuple(value.shape))).encode())
            total.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            total.update(repr(leaf).encode())
    return total.hexdigest()


def _resumed(fresh: Surface, file: str | os.PathLike[str]) -> Surface:
    old = Surface.load(file)
    wrong = [name for name in fresh.info if old.info.get(name) != fresh.info[name]]
    same = len(old.coordinates) == len(fresh.coordinates) and all(map(np.array_equal, old.coordinates, fresh.coordinates))
    if wrong or not same:
        what = ", ".join(wrong) if wrong else "coordinates"
        raise InvalidArgument(
            f"{os.fspath(file)} holds a surface of something else ({what} differ), so it cannot be continued. "
            "Give another file, or delete it."
        )
    return old
