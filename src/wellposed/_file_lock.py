"""Locks of open files, which the operating system gives free when a process ends, however it ends."""

from __future__ import annotations

import errno
import os
import sys

__all__ = ["is_at", "try_lock"]

#: Where the lock of Windows lies: far behind the content, which others must be able to read.
_FAR = 1 << 30


def try_lock(handle: int) -> bool:
    """Takes the lock of an open file or folder until it is closed; False if another process has it.

    Raises:
        OSError: The file system has no locks.
    """
    try:
        if sys.platform == "win32":
            import msvcrt

            os.lseek(handle, _FAR, os.SEEK_SET)
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
            os.lseek(handle, 0, os.SEEK_SET)
        else:
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES, errno.EWOULDBLOCK, errno.EDEADLK):
            return False
        raise
    return True


def is_at(handle: int, path: str | os.PathLike[str], *, follow: bool = False) -> bool:
    """Whether an open file is still the one of this name.

    Args:
        handle: Of the file or folder.
        path: Its name.
        follow: Whether `path` may be a link to it.
    """
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path, follow_symlinks=follow))
    except OSError:
        return False
