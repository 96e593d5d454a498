"""Files that are written whole or not at all."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from wellposed.errors import RunError

__all__ = ["append_line", "is_temporary", "sync_folder", "write_whole", "writing"]

_REASONS = {
    errno.ENOSPC: "the disk is full; free some space",
    errno.EDQUOT: "the disk quota is used up; free some space",
    errno.EFBIG: "the file would grow beyond the limit for files of this process; raise the limit (ulimit -f)",
    errno.EROFS: "the file system is read-only; choose another folder",
    errno.EACCES: "this folder may not be written; choose another one, or change its permissions",
    errno.EPERM: "this folder may not be written; choose another one, or change its permissions",
    errno.ENOTDIR: "a part of this path is a file and not a folder; choose another one",
}


@contextmanager
def writing(path: Path, *, begun: bool = True) -> Iterator[None]:
    """Turns what the operating system says about `path` into one sentence.

    Args:
        path: What is written.
        begun: Whether there is a run already that something may have happened to.
    """
    try:
        yield
    except OSError as error:
        reason = _REASONS.get(error.errno or 0, f"{error.strerror or error}")
        kept = " Everything up to the last checkpoint is kept, and --resume goes on from there." if begun else ""
        raise RunError(f"Cannot write {path}: {reason}.{kept}") from error


def write_whole(path: Path, content: bytes) -> None:
    """Replaces a file so that a reader, or a crash at any moment, sees the old content or the new one, never a part.

    A temporary file beside it is written and synced to the disk, then renamed, and then the folder is synced.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with writing(path):
        try:
            with temporary.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def is_temporary(name: str) -> bool:
    """Whether a file of this name is what `write_whole` leaves when it is killed."""
    return re.fullmatch(r"\..+\.\d+\.tmp", name) is not None


def append_line(path: Path, line: str) -> None:
    """Adds a line and waits until it is on the disk."""
    with writing(path), path.open("ab") as file:
        file.write(line.encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Makes renames in a folder survive a loss of power, where the system can do that."""
    if os.name == "nt":
        return  # folders cannot be opened there
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
