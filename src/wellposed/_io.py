"""Files that are written whole or not at all, and never through a link.

New content is written under a temporary name, and the file is then renamed. A temporary file is
locked while its writer is alive, so `sweep` removes only those of killed processes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from wellposed.errors import RunError

__all__ = [
    "Temporary",
    "append_line",
    "check_outputs",
    "is_at",
    "is_temporary",
    "open_plain",
    "refuse_special_files",
    "remove",
    "replacing",
    "set_aside",
    "sweep",
    "try_lock",
    "write_whole",
    "writing",
]

_LINK = "it is a link to another file; remove it, or put a copy of that file in its place"
_REASONS = {
    errno.ENOSPC: "the disk is full; free some space",
    errno.EDQUOT: "the disk quota is used up; free some space",
    errno.EFBIG: "the file would grow beyond the limit for files of this process; raise the limit (ulimit -f)",
    errno.EROFS: "the file system is read-only; choose another folder",
    errno.EACCES: "this folder may not be written; choose another one, or change its permissions",
    errno.EPERM: "this folder may not be written; choose another one, or change its permissions",
    errno.EEXIST: "a file is in the place of this folder; move it away",
    errno.EISDIR: "a folder is in the place of this file; move it away",
    errno.ENOTDIR: "a part of this path is a file and not a folder; choose another one",
    errno.ELOOP: _LINK,
    errno.EMLINK: _LINK,
    errno.ENXIO: "it is a pipe, a socket or a device and not a file; remove it",
}

_NOFOLLOW: int = getattr(os, "O_NOFOLLOW", 0)
#: A pipe without a reader must not keep us waiting; children must not inherit; Windows must not change line ends.
_ALWAYS: int = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


@contextmanager
def writing(path: Path, *, begun: bool = True) -> Iterator[None]:
    """Turns an `OSError` about `path` into a `RunError` of one sentence.

    Args:
        path: What is written.
        begun: Whether the run exists already, so that a checkpoint may be there to resume from.
    """
    try:
        yield
    except OSError as error:
        reason = _REASONS.get(error.errno or 0, f"{error.strerror or error}")
        kept = " Everything up to the last checkpoint is kept, and --resume continues from there." if begun else ""
        raise RunError(f"Cannot write {path}: {reason}.{kept}") from error


def check_outputs(folder: Path, names: Iterable[str]) -> None:
    """Makes a folder, and raises `RunError` unless files of these names can be written there:
    before the work for them."""
    with writing(folder, begun=False):
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
    for path in (folder / name for name in names):
        with writing(path, begun=False):
            if path.is_dir():
                raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))


def open_plain(path: Path, flags: int) -> int:
    """The handle of a regular file; links are not followed.

    Raises:
        OSError: ELOOP for a link, EMLINK for writing to a file with a second hard link, ENXIO for a
            pipe, a socket or a device; or the error of the operating system.
    """
    if not _NOFOLLOW and os.path.islink(path):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    handle = os.open(path, flags | _NOFOLLOW | _ALWAYS, 0o666)
    found = os.fstat(handle)
    wrong = 0 if stat.S_ISREG(found.st_mode) else errno.EISDIR if stat.S_ISDIR(found.st_mode) else errno.ENXIO
    if not wrong and flags & (os.O_WRONLY | os.O_RDWR) and found.st_nlink > 1:
        wrong = errno.EMLINK
    if wrong:
        os.close(handle)
        raise OSError(wrong, os.strerror(wrong), str(path))
    return handle


def refuse_special_files(folder: Path, inside: Iterable[str] = (), in_place: Iterable[str] = ()) -> None:
    """Raises `RunError` if a folder, possibly a link, contains a link, pipe, socket or device.

    Args:
        folder: The folder to check.
        inside: Names of subfolders to check too, if they exist.
        in_place: Names of files changed in place, which may not have a second hard link.
    """
    for name in ("", *inside):
        try:
            entries = sorted(os.scandir(folder / name if name else folder), key=lambda entry: entry.name)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise RunError(f"{folder / name} cannot be read ({error.strerror}); change its permissions.") from error
        for entry in entries:
            path = folder / name / entry.name
            second = entry.name in in_place and not name and entry.stat(follow_symlinks=False).st_nlink > 1
            if entry.is_symlink() or second:
                raise RunError(
                    f"{path} is a link, and nothing in a run is followed: remove it, or put a copy of what it points to in its "
                    "place."
                )
            if not (entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False)):
                raise RunError(f"{path} is a pipe, a socket or a device; a run holds files and folders only. Remove it.")


def try_lock(handle: int) -> bool:
    """Locks an open file or folder until it is closed; False if another process holds the lock.

    Raises:
        OSError: The file system does not support locks.
    """
    from filelock import lock_descriptor

    return lock_descriptor(handle, blocking=False)


def is_at(handle: int, path: str | os.PathLike[str], *, follow: bool = False) -> bool:
    """Whether `path` still names this open file.

    Args:
        handle: Of the file or folder.
        path: Its name.
        follow: Whether `path` may be a link to it.
    """
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path, follow_symlinks=follow))
    except OSError:
        return False


class Temporary:
    """A new file beside `path`, which replaces it when complete.

    Args:
        path: The file to create or replace.
        ending: Of the temporary name.

    Attributes:
        path: The temporary name.
        handle: Open for reading and writing, and locked.
    """

    def __init__(self, path: Path, ending: str = "tmp") -> None:
        self._target = path
        while True:
            self.path = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.{ending}")
            self.handle = open_plain(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            with contextlib.suppress(OSError):  # without locks there is no `sweep` either
                if not (try_lock(self.handle) and is_at(self.handle, self.path)):
                    self._close()
                    continue  # `sweep` came between
            return

    def commit(self) -> None:
        """Writes the content to the disk, then renames the file."""
        os.fsync(self.handle)
        if os.name == "nt":
            self._close()  # open files cannot be renamed there
        os.replace(self.path, self._target)
        self._close()
        _sync_folder(self._target.parent)

    def discard(self) -> None:
        """Removes the file."""
        self._close()
        self.path.unlink(missing_ok=True)

    def _close(self) -> None:
        handle, self.handle = self.handle, -1
        if handle >= 0:
            os.close(handle)


@contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """A file to write, which replaces `path` atomically when the context ends without an error."""
    temporary = Temporary(path)
    try:
        with os.fdopen(temporary.handle, "w+b", closefd=False) as file:
            yield file
        temporary.commit()
    except BaseException:
        temporary.discard()
        raise


def write_whole(path: Path, content: bytes, *, begun: bool = True) -> None:
    """Replaces a file atomically: after a crash it has the old content or the new one.

    Args:
        path: The file.
        content: All of it.
        begun: As in `writing`.
    """
    with writing(path, begun=begun), replacing(path) as file:
        file.write(content)


def append_line(path: Path, line: str) -> None:
    """Appends a line and waits until it is on the disk."""
    with writing(path):
        new = not path.exists()
        with os.fdopen(open_plain(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab") as file:
            file.write(line.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        if new:
            _sync_folder(path.parent)


def remove(path: Path) -> None:
    """Removes a file, if it is there; a folder of this name is foreign, and is set aside."""
    if path.is_dir():
        set_aside(path)
        return
    with writing(path):
        path.unlink(missing_ok=True)


def set_aside(path: Path) -> None:
    """Renames what is not usable, for whoever wants to know."""
    with writing(path):
        path.replace(path.with_name(f"{path.name}.refused"))


def is_temporary(name: str, ending: str = "tmp") -> bool:
    """Whether this is the name of a temporary file, which a killed writer leaves."""
    return re.fullmatch(rf"\..+\.\d+(-[0-9a-f]{{8}})?\.{ending}", name) is not None


def sweep(folder: Path, *, target: str | None = None, ending: str = "tmp") -> None:
    """Removes temporary files of killed processes; those of living processes stay.

    Args:
        folder: Where to look.
        target: Remove only temporary files of this file.
        ending: Of the temporary names.
    """
    with contextlib.suppress(OSError):  # a folder that is missing or not readable
        for name in os.listdir(folder):
            if is_temporary(name, ending) and (target is None or name.startswith(f".{target}.")):
                _remove_if_dead(folder / name)


def _remove_if_dead(path: Path) -> None:
    with contextlib.suppress(OSError):  # already gone, not ours, or without locks
        handle = open_plain(path, os.O_RDWR)
        try:
            dead = try_lock(handle)
            if dead and os.name != "nt":
                path.unlink()
        finally:
            os.close(handle)
        if dead and os.name == "nt":
            path.unlink()


def _sync_folder(folder: Path) -> None:
    """Makes renames in a folder survive a power failure, where the system can do that."""
    if os.name == "nt":
        return  # folders cannot be opened there
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
