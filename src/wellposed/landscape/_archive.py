"""Records as JSON or as one .npz file that is either old or new, never half."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from wellposed._io import replacing, sweep
from wellposed._reading import parse_json, read_arrays
from wellposed.errors import InvalidArgument

__all__ = ["from_plain", "load_arrays", "plain", "save_arrays", "whole"]

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
    """Writes next to the target and renames, which the file system does at once; both are on the disk afterwards."""
    target = Path(path)
    sweep(target.parent, target=target.name)
    with replacing(target) as file:
        np.savez(file, **{_TEXT: np.array(json.dumps(dict(text)))}, **arrays)  # type: ignore[arg-type]


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
    """Turns a part of a record that is missing, or has the wrong form, into a sentence.

    Args:
        path: The file.
        kind: What it should hold.
    """
    try:
        yield
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise InvalidArgument(
            f"{os.fspath(path)} holds a damaged record of a {kind}: {reason}. Give another file or delete it."
        ) from error
