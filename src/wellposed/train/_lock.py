"""One process a run directory."""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import IO, Any

from wellposed.errors import RunError, RunLocked
from wellposed.train._atomic import writing

__all__ = ["Lock"]

#: Where the lock of Windows lies: far behind the content, which others must be able to read.
_FAR = 1 << 30


class Lock:
    """Held by the operating system for the life of this process, so that it falls with it, even after SIGKILL.

    The file says who holds it. One that a dead process left behind is taken over.

    Args:
        folder: The run directory.

    Attributes:
        left_by: What a dead holder wrote into the file, or None.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "lock"
        with writing(path):
            file = path.open("a+", encoding="utf-8")
        file.seek(0)
        holder = _holder(file)
        try:
            _acquire(file)
        except OSError as error:
            file.close()
            if error.errno not in (errno.EAGAIN, errno.EACCES, errno.EWOULDBLOCK, errno.EDEADLK):
                raise RunError(f"{path} cannot be locked ({error.strerror}); choose a folder on a local disk.") from error
            who = "another process" if holder is None else f"process {holder.get('pid')} on {holder.get('host')}"
            raise RunLocked(f"{folder} is in use by {who}; wait until it ends, stop it, or choose another folder.") from None
        self.left_by = holder
        self._file: IO[str] | None = file
        with writing(path):
            file.truncate(0)
            json.dump({"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%dT%H:%M:%S%z")}, file)
            file.flush()

    def release(self) -> None:
        """Gives the directory free; the file stays and is empty."""
        if self._file is None:
            return
        try:
            self._file.truncate(0)
        except OSError:
            pass  # a full disk must not hide the error that ended the run
        self._file.close()
        self._file = None


def _holder(file: IO[str]) -> dict[str, Any] | None:
    try:
        found = json.loads(file.read())
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _acquire(file: IO[str]) -> None:
    if sys.platform == "win32":
        import msvcrt

        file.seek(_FAR)
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        file.seek(0)
    else:
        import fcntl

        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
