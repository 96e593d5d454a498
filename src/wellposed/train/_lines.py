"""A file of lines that survives what happens to it while it is written."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from wellposed._files import append_line, open_plain, write_whole, writing

__all__ = ["LineFile"]


class LineFile:
    """Lines that one process adds to; it knows them all and puts them back if the file is deleted or changed meanwhile.

    Args:
        path: The file; what is in it already counts.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._content: bytes | None = None  # read when it is needed
        self._known: tuple[int, ...] | None = None

    def set(self, content: bytes) -> None:
        """Replaces all lines."""
        write_whole(self.path, content)
        self._content, self._known = content, _identity(self.path)

    def add(self, line: str) -> None:
        """A line: on the disk when this returns. Call `restore` first."""
        content = self._present()
        append_line(self.path, line)
        self._content, self._known = content + line.encode() + b"\n", _identity(self.path)

    def restore(self) -> str | None:
        """Puts back what is not there any more; a sentence about it, or None if all is as it was left.

        A file that is there instead is not lost: it gets another name.
        """
        content, now = self._present(), _identity(self.path)
        if now == self._known:
            return None
        if now is not None and stat.S_ISREG(now[0]) and now[3] == len(content) and _read(self.path) == content:
            self._known = now  # copied back, or touched
            return None
        what = f"{self.path.name} was deleted while the run wrote it; its lines are put back."
        if now is not None:
            aside = _free(self.path)
            with writing(self.path):
                os.rename(self.path, aside)
            what = (
                f"{self.path.name} was changed while the run wrote it; {aside.name} has the change, and the lines are put back."
            )
        self.set(content)
        return what

    def _present(self) -> bytes:
        if self._content is None:
            self._content, self._known = _read(self.path), _identity(self.path)
        return self._content


def _read(path: Path) -> bytes:
    with writing(path):
        try:
            handle = open_plain(path, os.O_RDONLY)
        except FileNotFoundError:
            return b""
        with os.fdopen(handle, "rb") as file:
            return file.read()


def _identity(path: Path) -> tuple[int, ...] | None:
    """Equal as long as it is the same file with the same content."""
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_mode, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _free(path: Path) -> Path:
    """A name beside it that is not taken."""
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.name}.changed-{number}")):
        number += 1
    return aside
