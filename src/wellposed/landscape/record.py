"""What the evaluation of a landscape leaves behind."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from wellposed.errors import InvalidArgument
from wellposed.landscape._archive import from_plain, load_arrays, plain, save_arrays, whole
from wellposed.landscape.cell_status import CellStatus

__all__ = ["Surface"]

_FIELDS = ("kind", "coordinates", "values", "status", "num_steps", "failed", "seconds", "info", "valid", "status_names")


@dataclass(eq=False)
class Surface:
    """A loss on a line or a grid of parameters, with what is known about every point.

    Attributes:
        coordinates: One (k,) array for each direction: the multiples of it.
        values: (k,) or (k, l) the loss; NaN wherever it is not known to be that of *the* equilibrium.
        status: The same shape, of `CellStatus` codes.
        num_steps: The same shape: evaluations of the map a sample, all starts together; 0 without equilibria.
        failed: The same shape: at a point that is NOT_CONVERGED or NOT_UNIQUE the part of its (checked) samples that are to
            blame, with batches at least that part; NaN where that is not known, 0 at points that are fine.
        seconds: Spent on it, interruptions left out.
        info: How it was made; plain Python.
    """

    coordinates: tuple[np.ndarray, ...]
    values: np.ndarray
    status: np.ndarray
    num_steps: np.ndarray
    failed: np.ndarray
    seconds: float = 0.0
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def valid(self) -> np.ndarray:
        """Where the value may be taken as true."""
        return self.status == CellStatus.VALID

    @property
    def complete(self) -> bool:
        """Whether every point was evaluated."""
        return not bool((self.status == CellStatus.PENDING).any())

    def counts(self) -> dict[str, int]:
        """How many points have each status, by name; those that none has are left out."""
        found = {status.name: int((self.status == status).sum()) for status in CellStatus}
        return {name: count for name, count in found.items() if count}

    def to_dict(self) -> dict[str, Any]:
        """Plain Python that JSON can write and `wellposed.plot` can draw."""
        return {
            "kind": "surface",
            "coordinates": [plain(axis) for axis in self.coordinates],
            "values": plain(self.values),
            "status": self.status.tolist(),
            "num_steps": plain(self.num_steps),
            "failed": plain(self.failed),
            "seconds": self.seconds,
            "info": self.info,
            "valid": self.valid.tolist(),
            "status_names": [status.name for status in CellStatus],
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Surface:
        """The surface that `to_dict` wrote."""
        if wrong := set(_FIELDS) ^ set(record):
            raise InvalidArgument(f"This is no surface: fields {sorted(wrong)} are missing or unknown.")
        return cls(
            tuple(from_plain(axis) for axis in record["coordinates"]),
            from_plain(record["values"]),
            from_plain(record["status"], np.int8),
            from_plain(record["num_steps"]),
            from_plain(record["failed"]),
            float(record["seconds"]),
            dict(record["info"]),
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes one .npz file, at once or not at all."""
        axes = {f"axis{i}": axis for i, axis in enumerate(self.coordinates)}
        arrays = {"values": self.values, "status": self.status, "num_steps": self.num_steps, "failed": self.failed, **axes}
        save_arrays(path, arrays, {"kind": "surface", "seconds": self.seconds, "info": self.info})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Surface:
        """The surface that `save` wrote."""
        arrays, text = load_arrays(path, "surface")
        with whole(path, "surface"):
            values, status, num_steps, failed = (arrays[name] for name in ("values", "status", "num_steps", "failed"))
            axes = tuple(arrays[f"axis{i}"] for i in range(values.ndim))
            shape = tuple(len(axis) for axis in axes if axis.ndim == 1)
            if values.ndim not in (1, 2) or any(part.shape != shape for part in (values, status, num_steps, failed)):
                raise ValueError("the shapes of its arrays do not fit each other")
            if status.dtype.kind != "i" or not np.isin(status, list(CellStatus)).all():
                raise ValueError("a status is none of those that there are")
            return cls(axes, values, status, num_steps, failed, float(text["seconds"]), dict(text["info"]))

    def __repr__(self) -> str:
        shape = " x ".join(map(str, self.values.shape))
        counts = ", ".join(f"{name}: {count}" for name, count in self.counts().items())
        known = self.values[np.isfinite(self.values)]
        span = f"loss {known.min():.4g} to {known.max():.4g}" if known.size else "no loss known"
        return f"Surface({shape}, {span}, {counts}, {self.seconds:.1f} s)"
