"""Records of landscapes: what is known about every point, saved as JSON or as one .npz file."""

from __future__ import annotations

import enum
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from wellposed._io import replacing, sweep
from wellposed._reading import parse_json, read_arrays
from wellposed.errors import InvalidArgument

#: Bytes of a file and of its arrays.
BYTES = 1 << 31

_TEXT = "__record__"


def plain(array: np.ndarray) -> Any:
    """Nested lists that JSON can write: NaN becomes null, infinities text."""

    def of(value: Any) -> Any:
        if isinstance(value, list):
            return [of(part) for part in value]
        if isinstance(value, float) and not math.isfinite(value):
            return None if math.isnan(value) else str(value)
        return value

    return of(np.asarray(array).tolist())


def from_plain(value: Any, dtype: Any = np.float64) -> np.ndarray:
    """Back from `plain`."""

    def of(part: Any) -> Any:
        if isinstance(part, list):
            return [of(entry) for entry in part]
        return math.nan if part is None else float(part) if isinstance(part, str) else part

    return np.array(of(value), dtype=dtype)


def save_arrays(path: str | os.PathLike[str], arrays: Mapping[str, np.ndarray], text: Mapping[str, Any]) -> None:
    """Writes beside the target and renames, so that the target is old or new, never half."""
    target = Path(path)
    sweep(target.parent, target=target.name)
    with replacing(target) as file:
        np.savez(file, **{_TEXT: np.array(json.dumps(dict(text)))}, **arrays)  # type: ignore[arg-type]  # numpy's own options have other types


def load_arrays(path: str | os.PathLike[str], kind: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The arrays and the text of a record of this kind."""
    says = f"{{path}} holds no record of a {kind}: it is damaged, or was not written by `save`. Give another file or delete it."
    target = Path(path)
    if not target.exists() or target.is_dir():
        what = "is a folder" if target.is_dir() else "does not exist"
        raise InvalidArgument(f"{target} {what}; expected the .npz file that `save` wrote of a {kind}.")
    arrays = read_arrays(target, limit=BYTES, error=InvalidArgument, says=says) or {}
    try:
        text = parse_json(str(arrays.pop(_TEXT)), str(target), error=InvalidArgument)
    except (KeyError, InvalidArgument) as error:
        raise InvalidArgument(says.format(path=target)) from error
    if not isinstance(text, dict) or any(array.dtype.kind not in "iuf" for array in arrays.values()):
        raise InvalidArgument(says.format(path=target))
    if text.get("kind") != kind:
        raise InvalidArgument(f"{target} holds a record of kind {text.get('kind')!r:.60}; expected {kind!r}.")
    return arrays, text


@contextmanager
def whole(path: str | os.PathLike[str], kind: str) -> Iterator[None]:
    """Raises `InvalidArgument` where a part of a record is missing or has the wrong form."""
    try:
        yield
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise InvalidArgument(
            f"{os.fspath(path)} holds a damaged record of a {kind}: {reason}. Give another file or delete it."
        ) from error


class CellStatus(enum.IntEnum):
    """How the evaluation of one point went; each member carries its explanation as `message`.

    Examples:
        >>> import wellposed as wp
        >>> wp.landscape.CellStatus.NOT_CONVERGED.message
        'the solve of some sample failed to converge'
    """

    PENDING = 0
    VALID = 1
    UNCHECKED = 2
    NOT_CONVERGED = 3
    NOT_UNIQUE = 4
    ILL_POSED = 5
    NOT_FINITE = 6
    NOT_PROVED = 7

    @property
    def message(self) -> str:
        """What this status means, in one sentence."""
        return _MESSAGES[self]


_MESSAGES = {
    CellStatus.PENDING: "not evaluated yet",
    CellStatus.VALID: "every equilibrium converged, and is unique by proof or by every start that was tried",
    CellStatus.UNCHECKED: "every equilibrium converged; whether there are others was not asked",
    CellStatus.NOT_CONVERGED: "the solve of some sample failed to converge",
    CellStatus.NOT_UNIQUE: "another start led some sample to another equilibrium",
    CellStatus.ILL_POSED: "the model refuses to be evaluated, because it has no equilibrium there",
    CellStatus.NOT_FINITE: "the loss is NaN or infinite",
    CellStatus.NOT_PROVED: "every equilibrium converged, and no start led elsewhere, but the model's own bound proves nothing",
}


_FIELDS = ("kind", "coordinates", "values", "status", "num_steps", "failed", "seconds", "info", "valid", "status_names")


@dataclass(eq=False)
class Surface:
    """A loss on a line or a grid of parameters, with what is known about every point.

    Attributes:
        coordinates: One (k,) array for each direction: the multiples of it.
        values: (k,) or (k, l) the loss; NaN wherever it is not known to be that of *the*
            equilibrium.
        status: The same shape, of `CellStatus` codes.
        num_steps: The same shape: evaluations of the map a sample, all starts together; 0 without
            equilibria.
        failed: The same shape: at a point that is NOT_CONVERGED or NOT_UNIQUE the part of its
            (checked) samples that are to blame, with batches at least that part; NaN where that is
            not known, 0 at points that are fine.
        seconds: Spent on it, without interruptions.
        info: How it was made; plain Python.

    Examples:
        >>> import torch, wellposed as wp
        >>> model = wp.GaussianDEQ(3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        >>> X, y = torch.eye(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
        >>> surface = wp.landscape.surface(model, torch.nn.functional.mse_loss, X, y, num=3, radius=0.1)
        >>> surface.values.shape, surface.counts()
        ((3, 3), {'VALID': 9})
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
        """How many points have each status, by name, without zeros."""
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
            raise InvalidArgument(f"This is not a surface: fields {sorted(wrong)} are missing or unknown.")
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
