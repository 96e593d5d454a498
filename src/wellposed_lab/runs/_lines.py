"""A file of lines that survives what happens to it while it is written."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable
from pathlib import Path

from wellposed._io import open_plain, replacing, writing

__all__ = ["LineFile"]


class LineFile:
    """Lines that one process adds to; it knows them all and puts them back if the file is deleted or changed meanwhile.

    Args:
        path: The file; what is in it already counts.
        say: Told of what had to be put back.
    """

    def __init__(self, path: Path, say: Callable[[str], None]) -> None:
        self.path, self._say = path, say
        self._content: bytes | None = None  # read when it is needed
        self._known: tuple[int, ...] | None = None  # as it was left; None if it is not there yet

    def set(self, content: bytes) -> None:
        """Replaces all lines."""
        with writing(self.path), replacing(self.path) as file:
            file.write(content)
            file.flush()
            known = _identity(os.fstat(file.fileno()))
        self._content, self._known = content, known

    def add(self, line: str) -> None:
        """A line: on the disk when this returns."""
        added = line.encode() + b"\n"
        with writing(self.path):
            while True:  # until nothing comes between looking and opening
                self.restore()
                if self._known is None:
                    return self.set(added)
                try:
                    handle = open_plain(self.path, os.O_WRONLY | os.O_APPEND)
                except FileNotFoundError:
                    continue
                with os.fdopen(handle, "ab") as file:
                    if _identity(os.fstat(handle)) == self._known:
                        file.write(added)
                        file.flush()
                        os.fsync(handle)
                        self._content, self._known = self._present() + added, _identity(os.fstat(handle))
                        return

    def restore(self) -> None:
        """Puts back what is not there any more; a file that is there instead is not lost but gets another name."""
        content, name = self._present(), self.path.name
        try:
            found = os.lstat(self.path)
        except FileNotFoundError:
            if self._known is not None:
                self.set(content)
                self._say(f"{name} was deleted while the run wrote it; its lines are put back.")
            return
        if _identity(found) == self._known:
            return
        if stat.S_ISREG(found.st_mode) and found.st_size == len(content) and _read(self.path) == content:
            self._known = _identity(found)  # touched, or copied back
            return
        aside = _free(self.path)
        with writing(self.path):
            os.rename(self.path, aside)
        self.set(content)
        self._say(f"{name} was changed while the run wrote it; {aside.name} has the change, and its lines are put back.")

    def _present(self) -> bytes:
        if self._content is None:
            self._content = _read(self.path)
            with contextlib.suppress(FileNotFoundError):
                self._known = _identity(os.lstat(self.path))
        return self._content


def _read(path: Path) -> bytes:
    with writing(path):
        try:
            handle = open_plain(path, os.O_RDONLY)
        except FileNotFoundError:
            return b""
        with os.fdopen(handle, "rb") as file:
            return file.read()


def _identity(found: os.stat_result) -> tuple[int, ...]:
    """Equal as long as it is the same file with the same content."""
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _free(path: Path) -> Path:
    """A name beside it that is not taken."""
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.name}.changed-{number}")):
        number += 1
    return aside
