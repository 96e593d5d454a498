"""Which data sets are available here: the files that each one needs, and where they are."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from wellposed.data.files import FILES
from wellposed.data.restoration import IMAGES
from wellposed.data.text import TEXTS


def files_of(name: str) -> tuple[str, ...]:
    """The files that a data set needs, as paths in $WELLPOSED_DATA; none if it is built in."""
    if name in TEXTS:
        return tuple(f"{name}/{file}" for file in TEXTS[name])
    if name == "deblurring":
        return tuple(f"{image}.npz" for image in IMAGES)
    return (f"{name}.npz",) if name in FILES else ()


def missing_files(name: str) -> list[str]:
    """Those files that are not there."""
    folder = os.environ.get("WELLPOSED_DATA")
    return [file for file in files_of(name) if not folder or not (Path(folder) / file).is_file()]


def is_available(name: str) -> bool:
    """Whether the data set can be loaded without the network."""
    if name == "digits":
        return importlib.util.find_spec("sklearn") is not None
    return not missing_files(name)
