"""The paths of solvers, and their projection to a plane that all of them share."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from wellposed._checks import check_positive_integer
from wellposed._tree import Layout, host_dtype
from wellposed.errors import InvalidArgument, InvalidType, NotConverged, required
from wellposed.landscape._model import equilibrium_layers, strict
from wellposed.landscape.record import from_plain, load_arrays, plain, save_arrays, whole
from wellposed.nn import EquilibriumLayer
from wellposed.nn.layer import DEFAULT_RTOL
from wellposed.solve import AbstractSolver, AbstractSplitting, fixed_point
from wellposed.solve.loop import iterate
from wellposed.solve.map import FunctionMap, RowsCoupled
from wellposed.solve.solver import Tolerance


@dataclass(eq=False)
class Trajectory:
    """Every point at which the map was evaluated, sample by sample.

    Attributes:
        states: (steps, batch, features), NaN after a sample's last evaluation.
        residual: (steps, batch) |f(z) - z| / |f(z)| there.
        num_steps: (batch,) evaluations that took place.
        status: (batch,) `wellposed.Status` codes: 0 has converged.
        info: How it was made; plain Python.
    """

    states: np.ndarray
    residual: np.ndarray
    num_steps: np.ndarray
    status: np.ndarray
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def converged(self) -> np.ndarray:
        """(batch,) bool."""
        return self.status == 0

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes one .npz file, at once or not at all."""
        arrays = {"states": self.states, "residual": self.residual, "num_steps": self.num_steps, "status": self.status}
        save_arrays(path, arrays, {"kind": "trajectory", "info": self.info})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trajectory:
        """What `save` wrote."""
        arrays, text = load_arrays(path, "trajectory")
        with whole(path, "trajectory"):
            states, residual, num_steps, status = (arrays[name] for name in ("states", "residual", "num_steps", "status"))
            fits = states.ndim == 3 and residual.shape == states.shape[:2]
            if not fits or not num_steps.shape == status.shape == states.shape[1:2]:
                raise ValueError("the shapes of its arrays do not fit each other")
            return cls(states, residual, num_steps, status, dict(text["info"]))

    def __repr__(self) -> str:
        done = int(self.converged.sum())
        return f"Trajectory({self.states.shape[1]} samples, {done} converged, {self.states.shape[0]} steps at most)"


def trajectory(
    model: nn.Module,
    X: Any,
    *,
    solver: AbstractSolver | None = None,
    z0: Any = None,
    rtol: float | None = None,
    max_steps: int | None = None,
    layer: int = 0,
) -> Trajectory:
    r"""z^[0], z^[1], ... of a solver on the equilibrium of a model, as in [nguyen2022, Fig. 4.2].

    Samples that do not converge are recorded too, with their status. Values of the map are
    recorded, not products with its Jacobian (`NewtonKrylov`); the trials of a line search are part
    of the path.

    Args:
        model: A model with an `EquilibriumLayer`, or a layer; X is its input.
        X: (batch, ...) inputs.
        solver: By default that of the layer. Splitting methods cannot be followed: give another
            one.
        z0: The start; by default that of the model (zeros).
        rtol, max_steps: By default those of the layer.
        layer: Which of the model's equilibrium layers.
    """
    chosen = _chosen(model, layer)
    solver = chosen.solver if solver is None else solver
    if isinstance(solver, AbstractSplitting):
        raise InvalidType(f"trajectory cannot follow {solver!r}; give solver=Picard(), Anderson(), Broyden() or Auto().")
    with strict(model), torch.no_grad():
        x, start = _entered(model, chosen, X)
        start = start if z0 is None else z0
        layout = Layout.of(start, "z0")
        cell = _RecordingCell(chosen.cell, layout)
        index = torch.arange(layout.batch, device=layout.device)
        tolerance = DEFAULT_RTOL[layout.compute_dtype] if chosen.rtol is None else chosen.rtol
        rtol = tolerance if rtol is None else rtol
        max_steps = chosen.max_steps if max_steps is None else max_steps
        options: dict[str, Any] = {"rtol": rtol, "atol": chosen.atol, "max_steps": max_steps, "on_failure": "ignore"}
        solution = fixed_point(chosen.cell, start, solver, args=(x,), **options)  # its verdicts are confirmed
        flat = layout.flatten(start).detach().to(layout.compute_dtype)
        try:
            iterate(
                FunctionMap(cell, layout, (x, index)), flat, solver, tolerance=Tolerance(rtol, chosen.atol), max_steps=max_steps
            )
        except RowsCoupled:
            raise InvalidArgument("trajectory follows single samples; the rows of this cell depend on each other.") from None
    states, residual = cell.padded()
    info = {"model": type(model).__name__, "solver": repr(solver), "layer": layer}
    return Trajectory(states, residual, (~np.isnan(residual)).sum(axis=0), np.asarray(solution.status), info)


class _RecordingCell:
    """A cell that records where it was evaluated; an argument `index` identifies samples."""

    def __init__(self, cell: Callable[..., Any], layout: Layout) -> None:
        self._cell, self._layout = cell, layout
        self._seen: list[tuple[Tensor, Tensor, Tensor]] = []
        self._last = torch.full((layout.batch, sum(layout.sizes)), torch.nan, dtype=layout.compute_dtype, device=layout.device)

    def __call__(self, z: Any, x: Any, index: Tensor) -> Any:
        image = self._cell(z, x)
        if not torch.is_grad_enabled():  # with a graph it is a linearization, not a step
            rows, images = self._layout.flatten(z), self._layout.flatten(image)
            new = (rows != self._last[index]).any(dim=1)  # a point that is evaluated twice is one step
            self._last[index] = rows
            gap = torch.linalg.vector_norm(images - rows, dim=1)
            size = torch.linalg.vector_norm(images, dim=1)
            residual = torch.where(gap == 0, torch.zeros_like(gap), gap / size)
            self._seen.append((index[new], rows[new].clone(), residual[new]))
        return image

    def padded(self) -> tuple[np.ndarray, np.ndarray]:
        """(steps, batch, features) and (steps, batch)."""
        count = torch.zeros(self._layout.batch, dtype=torch.int64)
        places = []
        for index, _, _ in self._seen:
            places.append(count[index.cpu()].clone())
            count[index.cpu()] += 1
        shape = (int(count.max()), self._layout.batch, self._last.shape[1])
        states = np.full(shape, np.nan, dtype=host_dtype(self._last.dtype))  # may be large: in the dtype of the solve
        residual = np.full(states.shape[:2], np.nan)
        for place, (index, rows, r) in zip(places, self._seen, strict=True):
            states[place.numpy(), index.cpu().numpy()] = rows.cpu().numpy()
            residual[place.numpy(), index.cpu().numpy()] = r.double().cpu().numpy()
        return states, residual


class _Entered(Exception):
    """Ends a forward pass once the input of the layer is known."""


def _entered(model: nn.Module, layer: EquilibriumLayer, X: Any) -> tuple[Any, Any]:
    """The input and the start with which the model calls the layer."""
    seen: list[Any] = []

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs["x"]
        seen.extend([x, args[1] if len(args) > 1 else kwargs.get("z0")])
        raise _Entered

    handle = layer.register_forward_pre_hook(hook, with_kwargs=True)
    try:
        model(X)
    except _Entered:
        pass
    except NotConverged as error:
        raise NotConverged(f"trajectory: a layer before the chosen one failed: {error}", error.solution) from error
    finally:
        handle.remove()
    if not seen:
        raise InvalidArgument(f"{type(model).__name__} did not call the chosen layer on these inputs, so it has no trajectory.")
    x, z0 = seen
    if z0 is None:
        _, start, layout, _ = layer._bind(x, None, whole=False)
        z0 = layout.unflatten(start)
    return x, z0


def _chosen(model: Any, number: int) -> EquilibriumLayer:
    if not isinstance(model, nn.Module):
        raise InvalidType(f"model must be a torch.nn.Module; got {type(model).__name__}.")
    layers = equilibrium_layers(model)
    if not 0 <= number < len(layers):
        raise InvalidArgument(f"{type(model).__name__} has {len(layers)} equilibrium layers; got layer={number}.")
    return layers[number]


@dataclass(eq=False)
class Projection:
    """Trajectories in the same few principal components.

    Attributes:
        points: One (steps, batch, k) array for each trajectory, NaN after a sample's last step.
        residuals: One (steps, batch) array for each.
        explained: (k,) part of the variance of all states together that each component holds.
        names: Of the trajectories.
    """

    points: list[np.ndarray]
    residuals: list[np.ndarray]
    explained: np.ndarray
    names: list[str]

    def to_dict(self) -> dict[str, Any]:
        """Plain Python that JSON can write and `wellposed.plot` can draw."""
        return {
            "kind": "projection",
            "points": [plain(part) for part in self.points],
            "residuals": [plain(part) for part in self.residuals],
            "explained": plain(self.explained),
            "names": list(self.names),
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Projection:
        """What `to_dict` wrote."""
        if wrong := {"kind", "points", "residuals", "explained", "names"} ^ set(record):
            raise InvalidArgument(f"This is not a projection: fields {sorted(wrong)} are missing or unknown.")
        return cls(
            [from_plain(part) for part in record["points"]],
            [from_plain(part) for part in record["residuals"]],
            from_plain(record["explained"]),
            list(record["names"]),
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes one .npz file, at once or not at all."""
        arrays = {f"points{i}": part for i, part in enumerate(self.points)}
        arrays |= {f"residuals{i}": part for i, part in enumerate(self.residuals)}
        save_arrays(path, {**arrays, "explained": self.explained}, {"kind": "projection", "names": self.names})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Projection:
        """What `save` wrote."""
        arrays, text = load_arrays(path, "projection")
        with whole(path, "projection"):
            names = [str(name) for name in text["names"]]
            points, residuals = ([arrays[f"{part}{i}"] for i in range(len(names))] for part in ("points", "residuals"))
            if any(part.ndim != 3 or part.shape[:2] != r.shape for part, r in zip(points, residuals, strict=True)):
                raise ValueError("the shapes of its arrays do not fit each other")
            return cls(points, residuals, arrays["explained"], names)


def project(
    trajectories: Sequence[Trajectory], *, num: int = 2, names: Sequence[str] | None = None, scale: bool = False
) -> Projection:
    """PCA (scikit-learn) of all states of all trajectories together.

    Args:
        trajectories: With equally many features: starts, samples, solvers, or epochs of one model.
        num: Components.
        names: Of the trajectories; numbers if not given.
        scale: Whether all features get unit variance first.
    """
    check_positive_integer("project", "num", num)
    if not trajectories:
        raise InvalidArgument("project needs at least one trajectory.")
    names = [str(i) for i in range(len(trajectories))] if names is None else list(names)
    if len(names) != len(trajectories):
        raise InvalidArgument(f"project needs one name for each of {len(trajectories)} trajectories; got {len(names)}.")
    features = {one.states.shape[2] for one in trajectories}
    if len(features) != 1:
        raise InvalidArgument(f"project needs trajectories of equally many features; got {sorted(features)}.")
    PCA = required("sklearn.decomposition", "project needs scikit-learn", extra="data").PCA
    known = [np.isfinite(one.states).all(axis=2) for one in trajectories]
    rows = np.concatenate([one.states[mask] for one, mask in zip(trajectories, known, strict=True)])
    if min(rows.shape) < num:
        raise InvalidArgument(
            f"project cannot take num={num} components of {rows.shape[0]} states with {rows.shape[1]} features."
        )
    center = rows.mean(axis=0, dtype=np.float64).astype(rows.dtype)
    spread = rows.std(axis=0) if scale else np.ones(rows.shape[1], dtype=rows.dtype)
    spread[spread == 0] = 1.0
    rows -= center  # in place: the ways of a training run fill half of the memory
    rows /= spread
    few = num < min(rows.shape) // 100  # of a large matrix: by Lanczos steps, not all components
    pca = PCA(n_components=num, svd_solver="arpack" if few else "full", copy=False, random_state=0).fit(rows)
    del rows
    points = []
    for one, mask in zip(trajectories, known, strict=True):
        part = np.full((*one.states.shape[:2], num), np.nan)
        for step in range(len(part)):
            if mask[step].any():
                part[step, mask[step]] = pca.transform((one.states[step, mask[step]] - center) / spread)
        points.append(part)
    return Projection(points, [one.residual for one in trajectories], pca.explained_variance_ratio_, names)
