"""Results on the disk: one JSON file a task, so that a run that was interrupted goes on where it was."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
from pathlib import Path
from typing import Any

import torch

from wellposed._io import write_whole, writing
from wellposed._reading import read_object
from wellposed.errors import RunError
from wellposed_lab.papers._experiment import Result, Task

__all__ = ["TaskCache", "program", "write"]

#: The largest result that is read.
BYTES = 1 << 28
#: What no number depends on.
_WITHOUT_NUMBERS = {"cli", "plot"}


@functools.cache
def program() -> str:
    """What computes the numbers: the version of the package and of torch; of a development version also its source.

    The number of a development version stays while its code changes, and a result of other code must not pass for one
    of this.
    """
    version = importlib.metadata.version("wellposed")
    name = f"wellposed {version}, torch {torch.__version__}"
    if "dev" not in version:
        return name
    source = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(source.rglob("*.py")):
        if path.relative_to(source).parts[0] not in _WITHOUT_NUMBERS:
            digest.update(path.read_bytes())
    return f"{name}, source {digest.hexdigest()[:16]}"


class TaskCache:
    """Results of one experiment, in a folder.

    A file that cannot be read, or holds another task than its name says, is not there: the task is measured again.

    Args:
        folder: Made when the first result is kept.
        experiment: Its name.
    """

    def __init__(self, folder: Path, experiment: str) -> None:
        self.folder, self.experiment = folder, experiment

    def path(self, task: Task) -> Path:
        """Where the result of a task is, or would be."""
        text = json.dumps(self._key(task), sort_keys=True)
        return self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"

    def get(self, task: Task) -> Result | None:
        """The result, if it is there."""
        try:
            plain = read_object(self.path(task), limit=BYTES, error=RunError)
            if plain is None or plain["key"] != self._key(task):
                return None
            return Result(task, plain["values"], plain["seconds"], cached=True)
        except (RunError, KeyError):
            return None

    def put(self, result: Result) -> None:
        """Keeps a result: whole, or not at all."""
        plain = {"key": self._key(result.task), "values": result.values, "seconds": result.seconds}
        write(self.path(result.task), json.dumps(plain).encode())

    def _key(self, task: Task) -> dict[str, Any]:
        return {"experiment": self.experiment, "task": json.loads(json.dumps(task)), "program": program()}


def write(path: Path, content: bytes) -> None:
    """A file and its folders: whole, or not at all."""
    try:
        with writing(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)
    except RunError as error:
        reason = getattr(error.__cause__, "strerror", None) or error.__cause__
        raise RunError(
            f"Cannot write {path}: {reason}. Choose another folder by --out; tasks that were kept before are not lost."
        ) from error
