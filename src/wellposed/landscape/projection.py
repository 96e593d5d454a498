"""Trajectories in a plane that a whole set of them shares."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from wellposed._checks import check_positive_integer
from wellposed.errors import InvalidArgument, MissingPackage, how_to_install
from wellposed.landscape._archive import from_plain, load_arrays, plain, save_arrays, whole
from wellposed.landscape._trajectory import Trajectory

__all__ = ["Projection", "project"]


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
            raise InvalidArgument(f"This is no projection: fields {sorted(wrong)} are missing or unknown.")
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
    """PCA (scikit-learn) of all states of all trajectories together, so that their pictures can be compared.

    Args:
        trajectories: With equal numbers of features: different starts, samples, solvers, or epochs of one model.
        num: Components.
        names: Of the trajectories; numbers if not given.
        scale: Whether to give all features unit variance first; for states of very different units.
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
    try:
        from sklearn.decomposition import PCA
    except ImportError as error:
        raise MissingPackage(f"project needs scikit-learn; install it with: {how_to_install('data')}.") from error
    known = [np.isfinite(one.states).all(axis=2) for one in trajectories]
    rows = np.concatenate([one.states[mask] for one, mask in zip(trajectories, known, strict=True)])
    if min(rows.shape) < num:
        raise InvalidArgument(
            f"project cannot take num={num} components of {rows.shape[0]} states with {rows.shape[1]} features."
        )
    center = rows.mean(axis=0)
    spread = rows.std(axis=0) if scale else np.ones(rows.shape[1])
    spread[spread == 0] = 1.0
    pca = PCA(n_components=num, svd_solver="full").fit((rows - center) / spread)
    points = []
    for one, mask in zip(trajectories, known, strict=True):
        part = np.full((*one.states.shape[:2], num), np.nan)
        part[mask] = pca.transform((one.states[mask] - center) / spread)
        points.append(part)
    return Projection(points, [one.residual for one in trajectories], pca.explained_variance_ratio_, names)
