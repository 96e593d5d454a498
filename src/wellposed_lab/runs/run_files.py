"""The two files of a run directory that survive interference: the lock, and files of lines."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from wellposed._io import is_at, open_plain, replacing, try_lock, writing
from wellposed.errors import RunError, RunLocked

__all__ = ["LineFile", "RunLock"]

#: Bytes of the lock file that are read.
_LONGEST = 4096


class RunLock:
    """One process a run directory. The operating system releases the lock when the process ends.

    There are two locks: one of the directory itself, which cannot be deleted while it is held
    (Windows and some network file systems lack it), and one of the file `lock`, which names the
    holder. A file that a killed process left is taken over.

    Args:
        folder: The run directory.

    Attributes:
        left_by: What a killed holder wrote into the file, or None.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._path = folder, folder / "lock"
        self._directory = self._lock_directory()
        try:
            self._file, self.left_by = self._lock_file()
        except BaseException:
            self._close_directory()
            raise

    def renew(self) -> bool:
        """Checks that the lock is still held; True if the lock file was deleted and is made again.

        Raises:
            RunError: The directory or the file was replaced.
        """
        same = self._directory is None or is_at(self._directory, self._folder, follow=True)
        if same and is_at(self._file, self._path):
            return False
        if not same or self._directory is None or os.path.lexists(self._path):
            what = "the directory was moved or replaced" if not same else f"{self._path} was deleted or replaced"
            raise RunError(
                f"Another process may be using {self._folder}: {what} while this one was training, so it stops here. Nothing "
                "is lost up to the last checkpoint; continue with --resume when no other process is there."
            )
        self._close_file()
        self._file, _ = self._lock_file()
        return True

    def release(self) -> None:
        """Releases the directory; the file stays, empty."""
        with contextlib.suppress(OSError):  # a full disk must not hide the error that ended the run
            os.ftruncate(self._file, 0)
        self._close_file()
        self._close_directory()

    def _lock_directory(self) -> int | None:
        if os.name == "nt":
            return None  # Windows cannot open folders
        with writing(self._folder, begun=False):
            handle = os.open(self._folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if try_lock(handle):
                return handle
        except OSError:  # some network file systems; the lock file remains
            os.close(handle)
            return None
        os.close(handle)
        raise self._in_use()

    def _lock_file(self) -> tuple[int, dict[str, Any] | None]:
        """The handle, and what a killed holder wrote."""
        while True:
            with writing(self._path, begun=False):
                handle = open_plain(self._path, os.O_RDWR | os.O_CREAT)
            try:
                holder = _holder(handle)
                if not try_lock(handle):
                    raise self._in_use()
                if is_at(handle, self._path):  # not deleted since it was opened
                    me = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
                    with writing(self._path):
                        os.ftruncate(handle, 0)
                        os.lseek(handle, 0, os.SEEK_SET)
                        os.write(handle, json.dumps(me).encode())
                    return handle, holder
            except OSError as error:
                os.close(handle)
                raise RunError(f"{self._path} cannot be locked ({error.strerror}); choose a folder on a local disk.") from error
            except BaseException:
                os.close(handle)
                raise
            os.close(handle)

    def _in_use(self) -> RunLocked:
        holder = None
        with contextlib.suppress(OSError):
            handle = open_plain(self._path, os.O_RDONLY)
            holder = _holder(handle)
            os.close(handle)
        who = "another process" if holder is None else f"process {holder['pid']} on {holder['host']}"
        return RunLocked(f"{self._folder} is in use by {who}; wait until it ends, stop it, or choose another folder.")

    def _close_file(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _close_directory(self) -> None:
        if self._directory is not None:
            os.close(self._directory)
            self._directory = None


def _holder(handle: int) -> dict[str, Any] | None:
    """The holder named in a lock file; None if there is none."""
    try:
        found = json.loads(os.read(handle, _LONGEST))
    except (OSError, ValueError, RecursionError):  # OSError: Windows does not let others read a locked file
        return None
    if not isinstance(found, dict) or not isinstance(found.get("pid"), int) or not isinstance(found.get("host"), str):
        return None
    return found if found["host"].isprintable() else None


class LineFile:
    """Lines that this process appends, and restores if the file is deleted or changed.

    Args:
        path: The file, possibly with lines.
        log: Called with a sentence when lines were restored.
    """

    def __init__(self, path: Path, log: Callable[[str], None]) -> None:
        self.path, self._log = path, log
        self._content: bytes | None = None  # read when needed
        self._known: tuple[int, ...] | None = None  # identity after the last write; None before

    def set(self, content: bytes) -> None:
        """Replaces all lines."""
        with writing(self.path), replacing(self.path) as file:
            file.write(content)
            file.flush()
            known = _identity(os.fstat(file.fileno()))
        self._content, self._known = content, known

    def add(self, line: str) -> None:
        """Appends a line, on the disk when this returns."""
        added = line.encode() + b"\n"
        with writing(self.path):
            while True:  # until the file does not change between the check and the opening
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
        """Restores missing lines; a file in their place is renamed, not lost."""
        content, name = self._present(), self.path.name
        try:
            found = os.lstat(self.path)
        except FileNotFoundError:
            if self._known is not None:
                self.set(content)
                self._log(f"{name} was deleted while the run wrote it; its lines are restored.")
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
        self._log(f"{name} was changed while the run wrote it; {aside.name} has the change, and its lines are restored.")

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
    """Equal for the same file with the same content."""
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _free(path: Path) -> Path:
    """An unused name beside it."""
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.name}.changed-{number}")):
        number += 1
    return aside
