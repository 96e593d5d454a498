"""One process a run directory."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from wellposed._file_lock import is_at, try_lock
from wellposed._io import open_plain, writing
from wellposed.errors import RunError, RunLocked

__all__ = ["Lock"]

#: Bytes of the lock file that are read: what is longer was not written here.
_LONGEST = 4096


class Lock:
    """Held by the operating system for the life of this process, so that it falls with it, even after SIGKILL.

    There are two: one of the directory itself, which cannot be deleted from under its holder (Windows and some network file
    systems have none), and one of the file `lock`, which says who holds it. A file that a dead process left is taken over.

    Args:
        folder: The run directory.

    Attributes:
        left_by: What a dead holder wrote into the file, or None.
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
        """Makes sure that no other process came in; whether the lock file was gone and had to be made again.

        Raises:
            RunError: The directory is not the one that was locked, or `lock` is another file now.
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
        """Gives the directory free; the file stays and is empty."""
        with contextlib.suppress(OSError):  # a full disk must not hide the error that ended the run
            os.ftruncate(self._file, 0)
        self._close_file()
        self._close_directory()

    def _lock_directory(self) -> int | None:
        if os.name == "nt":
            return None  # folders cannot be opened there
        with writing(self._folder, begun=False):
            handle = os.open(self._folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if try_lock(handle):
                return handle
        except OSError:  # a network file system; the lock file is left
            os.close(handle)
            return None
        os.close(handle)
        raise self._in_use()

    def _lock_file(self) -> tuple[int, dict[str, Any] | None]:
        """The handle, and what a dead holder had written."""
        while True:
            with writing(self._path, begun=False):
                handle = open_plain(self._path, os.O_RDWR | os.O_CREAT)
            try:
                holder = _holder(handle)
                if not try_lock(handle):
                    raise self._in_use()
                if is_at(handle, self._path):  # not deleted by another one since it was opened
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
    """Who is written in a lock file; None if it is empty, or says something else."""
    try:
        found = json.loads(os.read(handle, _LONGEST))
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("pid"), int) or not isinstance(found.get("host"), str):
        return None
    return found if found["host"].isprintable() else None
