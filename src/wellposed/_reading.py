"""Files of unknown origin: regular files of a limited size, read without surprises; every failure is one sentence."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from wellposed.errors import WellposedError

__all__ = ["files_in", "opened", "parse_json", "read_bytes", "read_object", "read_text", "refuse_links", "sha256"]

#: Levels of lists and objects inside each other that JSON may have; our own records have at most eight.
DEPTH = 64
#: Files of one kind in a folder.
FILES = 100_000

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


@contextmanager
def opened(
    path: Path, *, limit: int, error: type[WellposedError], within: Path | None = None
) -> Iterator[tuple[BinaryIO, int] | None]:
    """A regular file and its size; None if there is no such file.

    A named pipe, a device or a folder is refused before anything is read, so that opening never waits.

    Args:
        path: The file.
        limit: The largest size in bytes.
        error: The class of every refusal.
        within: A folder above the file, inside which links are refused and not followed. None follows links, for a path that
            the caller was given by its user.
    """
    # O_NONBLOCK: a pipe without a writer opens at once, and is refused below
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    if within is not None:
        flags |= getattr(os, "O_NOFOLLOW", 0)
        refuse_links(path, within, error)
    try:
        handle = os.open(path, flags)
    except FileNotFoundError:
        yield None
        return
    except (OSError, ValueError) as problem:  # ValueError: a NUL in the name
        raise error(f"{path} cannot be read: {_reason(problem)}.") from problem
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode):
        os.close(handle)
        raise error(f"{path} is {_KINDS.get(stat.S_IFMT(found.st_mode), 'a special file')} and not a regular file.")
    with os.fdopen(handle, "rb") as file:
        if found.st_size > limit:
            raise error(f"{path} has {found.st_size:,} bytes; a file of this kind has at most {limit:,}.")
        yield file, found.st_size


def read_bytes(path: Path, *, limit: int, error: type[WellposedError], within: Path | None = None) -> bytes | None:
    """The content of a file; None if there is no such file. The arguments are those of `opened`."""
    with opened(path, limit=limit, error=error, within=within) as found:
        if found is None:
            return None
        try:
            content = found[0].read(limit + 1)  # it may have grown since it was opened
        except (OSError, MemoryError) as problem:
            raise error(f"{path} cannot be read: {_reason(problem)}.") from problem
    if len(content) > limit:
        raise error(f"{path} has more than {limit:,} bytes, the most that a file of this kind has.")
    return content


def sha256(path: Path, *, limit: int, error: type[WellposedError]) -> str | None:
    """The checksum of a file in hexadecimal; None if there is no such file. The arguments are those of `opened`."""
    total = hashlib.sha256()
    with opened(path, limit=limit, error=error) as found:
        if found is None:
            return None
        try:
            while part := found[0].read(1 << 20):
                total.update(part)
        except OSError as problem:
            raise error(f"{path} cannot be read: {_reason(problem)}.") from problem
    return total.hexdigest()


def read_text(path: Path, *, limit: int, error: type[WellposedError], within: Path | None = None) -> str | None:
    """The content of a UTF-8 file; None if there is no such file. The arguments are those of `opened`."""
    content = read_bytes(path, limit=limit, error=error, within=within)
    if content is None:
        return None
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise error(f"{path} is damaged: byte {problem.start} is not UTF-8 text.") from None


def read_object(path: Path, *, limit: int, error: type[WellposedError], within: Path | None = None) -> dict[str, Any] | None:
    """The JSON object that a file holds; None if there is no such file. The arguments are those of `opened`."""
    text = read_text(path, limit=limit, error=error, within=within)
    if text is None:
        return None
    plain = parse_json(text, str(path), error=error)
    if not isinstance(plain, dict):
        raise error(f"{path} must hold a JSON object; it holds a {type(plain).__name__}.")
    return plain


def parse_json(text: str, where: str, *, error: type[WellposedError]) -> Any:
    """What JSON text holds, at most `DEPTH` levels deep.

    Args:
        text: The JSON.
        where: Named in the refusal.
        error: The class of a refusal.
    """
    try:
        plain = json.loads(text)
    except RecursionError:
        raise error(f"{where} is nested more than {DEPTH} levels deep.") from None
    except ValueError as problem:  # also a whole number of thousands of digits
        raise error(f"{where} is not JSON ({str(problem).rstrip('.')}).") from None
    level, depth = [plain], 0
    while level := [part for part in level if isinstance(part, (dict, list))]:
        depth += 1
        if depth > DEPTH:
            raise error(f"{where} is nested more than {DEPTH} levels deep.")
        level = [inner for part in level for inner in (part.values() if isinstance(part, dict) else part)]
    return plain


def files_in(folder: Path, prefix: str, suffix: str, *, error: type[WellposedError], within: Path) -> list[Path]:
    """The files of a folder whose names begin and end like this, by name; none if there is no such folder.

    Args:
        folder: Where; a link is refused.
        prefix, suffix: Of the names.
        error: The class of a refusal.
        within: As in `opened`.
    """
    refuse_links(folder, within, error)
    found = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith(prefix) and entry.name.endswith(suffix):
                    found.append(folder / entry.name)
                if len(found) > FILES:
                    raise error(f"{folder} holds more than {FILES:,} files {prefix}*{suffix}.")
    except FileNotFoundError:
        return []
    except OSError as problem:
        raise error(f"{folder} cannot be read: {_reason(problem)}.") from problem
    return sorted(found)


def refuse_links(path: Path, within: Path, error: type[WellposedError]) -> None:
    """Refuses a link in any part of the path below `within`, the last one included.

    Args:
        path: What is to be read or written.
        within: A folder above it.
        error: The class of the refusal.
    """
    below = within
    for part in path.relative_to(within).parts:
        below = below / part
        try:
            is_link = stat.S_ISLNK(os.lstat(below).st_mode)
        except (OSError, ValueError):
            return  # opening it will say what is wrong
        if is_link:
            raise error(f"{below} is a link, and links in a run directory are not followed. Put the file itself there.")


def _reason(problem: Exception) -> str:
    if isinstance(problem, MemoryError):
        return "there is not enough memory for it"
    if isinstance(problem, OSError) and problem.errno == errno.ELOOP:
        return "it is a link"
    return str(getattr(problem, "strerror", None) or problem)
