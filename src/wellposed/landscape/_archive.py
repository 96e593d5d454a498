"""Records as JSON or as one .npz file that is either old or new, never half."""

from __future__ import annotations

import json
import math
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from wellposed._files import replacing, sweep
from wellposed.errors import InvalidArgument

__all__ = ["from_plain", "load_arrays", "plain", "save_arrays"]

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
    try:
        with open(path, "rb") as opened, np.load(opened, allow_pickle=False) as file:  # np.load leaves damaged files open
            arrays = {name: file[name] for name in file.files}
            text: dict[str, Any] = dict(json.loads(str(arrays.pop(_TEXT))))
    except (FileNotFoundError, IsADirectoryError) as error:
        what = "does not exist" if isinstance(error, FileNotFoundError) else "is a folder"
        raise InvalidArgument(f"{os.fspath(path)} {what}; expected the .npz file that `save` wrote of a {kind}.") from error
    except (KeyError, ValueError, TypeError, EOFError, zipfile.BadZipFile) as error:  # TypeError: a single array, .npy
        raise InvalidArgument(
            f"{os.fspath(path)} holds no record of a {kind}: it is damaged, or was not written by `save`. "
            "Give another file or delete it."
        ) from error
    if text.get("kind") != kind:
        raise InvalidArgument(f"{os.fspath(path)} holds a record of kind {text.get('kind')!r}; expected {kind!r}.")
    return arrays, text
