"""Files of unknown origin: regular files of limited size, JSON, NumPy archives."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import stat
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.lib import format as npy

from wellposed.errors import WellposedError

__all__ = ["files_in", "opened", "parse_json", "read_arrays", "read_bytes", "read_object", "read_text", "sha256"]

#: Largest depth of nested JSON; our own records have at most eight levels.
DEPTH = 64
#: Largest number of files of one kind in a folder.
FILES = 100_000
#: Largest size in bytes of the member list of an archive, which zipfile reads at once; a member takes about 60.
DIRECTORY = 1 << 20
#: Sizes of the end record of an archive, and of the longest comment after it.
_END, _COMMENT = 22, 1 << 16
#: Compression methods of members; with all others zipfile unpacks whole blocks, whatever size is stated.
_BOUNDED = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)

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
    """A regular file and its size; None if it does not exist. Pipes and devices are refused.

    Args:
        path: The file.
        limit: The largest size in bytes.
        error: The class of every refusal.
        within: A folder above the file in which links are refused; None follows links.
    """
    # O_NONBLOCK: a pipe without a writer opens at once, and is refused below
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    if within is not None:
        flags |= getattr(os, "O_NOFOLLOW", 0)
        _refuse_links(path, within, error)
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
    """The content of a file; None if it does not exist. Arguments as in `opened`."""
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
    """The hexadecimal checksum of a file; None if it does not exist. Arguments as in `opened`."""
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
    """The content of a UTF-8 file; None if it does not exist. Arguments as in `opened`."""
    content = read_bytes(path, limit=limit, error=error, within=within)
    if content is None:
        return None
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise error(f"{path} is damaged: byte {problem.start} is not UTF-8 text.") from None


def read_object(path: Path, *, limit: int, error: type[WellposedError], within: Path | None = None) -> dict[str, Any] | None:
    """The JSON object that a file holds; None if it does not exist. Arguments as in `opened`."""
    text = read_text(path, limit=limit, error=error, within=within)
    if text is None:
        return None
    plain = parse_json(text, str(path), error=error)
    if not isinstance(plain, dict):
        raise error(f"{path} must hold a JSON object; it holds a {type(plain).__name__}.")
    return plain


def parse_json(text: str, where: str, *, error: type[WellposedError]) -> Any:
    """The value of JSON text of at most `DEPTH` levels; an `error` names the text `where`."""
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
    """The files of a folder with this prefix and suffix, sorted; empty without the folder.

    `error` and `within` are as in `opened`; a folder that is a link is refused.
    """
    _refuse_links(folder, within, error)
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


def _refuse_links(path: Path, within: Path, error: type[WellposedError]) -> None:
    """Refuses a link in any part of `path` below the folder `within`, the last part included."""
    below = within
    for part in path.relative_to(within).parts:
        below = below / part
        try:
            is_link = stat.S_ISLNK(os.lstat(below).st_mode)
        except (OSError, ValueError):
            return  # opening it will say what is wrong
        if is_link:
            raise error(f"{below} is a link, and links in a run directory are not followed. Put the file itself there.")


class _Damaged(Exception):
    """What is wrong with an archive."""


def read_arrays(
    path: Path,
    *,
    limit: int,
    error: type[WellposedError],
    says: str,
    names: Sequence[str] | Callable[[list[str]], Sequence[str]] | None = None,
) -> dict[str, np.ndarray] | None:
    """The arrays of an .npz file by name; None if the file does not exist.

    The stated sizes are checked before anything is decompressed, and each array must have the size
    in its header. Objects, which need pickle, and encrypted members are refused.

    Args:
        path: The file; links are followed.
        limit: The largest size in bytes of the file, and of all arrays together.
        error: The class of every refusal.
        says: The refusal of a file that is not a sound archive, with {path} and {reason}.
        names: Which arrays, or a function that selects from all names; all if not given.
    """
    with opened(path, limit=limit, error=error) as found:
        if found is None:
            return None
        file, size = found
        try:
            _check_directory(file, size)
            with zipfile.ZipFile(file) as archive:
                held = [name.removesuffix(".npy") for name in archive.namelist()]
                return _arrays(archive, limit, names(held) if callable(names) else names)
        except WellposedError:
            raise
        except MemoryError:
            raise error(f"{path} cannot be read: there is not enough memory for its arrays.") from None
        except Exception as problem:  # zipfile, zlib, struct, tokenize and NumPy raise a dozen kinds on damaged bytes
            reason = str(problem) or type(problem).__name__
            raise error(says.format(path=path, reason=" ".join(reason.split()).rstrip("."))) from problem


def _check_directory(file: BinaryIO, size: int) -> None:
    """Refuses a member list that would fill the memory; zipfile finds its end in two places."""
    file.seek(max(0, size - _END - _COMMENT))
    tail = file.read()
    for place in {len(tail) - _END, tail.rfind(b"PK\5\6")}:
        if place < 0 or tail[place : place + 4] != b"PK\5\6":
            continue
        if int.from_bytes(tail[place + 12 : place + 16], "little") > DIRECTORY or tail[place - 20 : place - 16] == b"PK\6\7":
            raise _Damaged("its list of members is too long")
    file.seek(0)


def _arrays(archive: zipfile.ZipFile, limit: int, names: Sequence[str] | None) -> dict[str, np.ndarray]:
    members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
    chosen = members if names is None else {name: members[name] for name in names if name in members}
    total = sum(info.file_size for info in chosen.values())
    if total > limit:
        raise _Damaged(f"its arrays take {total:,} bytes; at most {limit:,} are read")
    return {name: _array(archive, info) for name, info in chosen.items()}


def _array(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray:
    if info.flag_bits & 1:
        raise _Damaged(f"{info.filename} is encrypted")
    if info.compress_type not in _BOUNDED:
        raise _Damaged(f"{info.filename} is compressed by method {info.compress_type}; NumPy writes stored or deflated members")
    with archive.open(info) as member:
        version = npy.read_magic(member)
        if version not in ((1, 0), (2, 0)):
            raise _Damaged(f"{info.filename} has format {version}; expected (1, 0) or (2, 0)")
        header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, is_fortran, dtype = header(member)
        if dtype.hasobject:
            raise _Damaged(f"{info.filename} holds Python objects, which are never loaded")
        stated, there = math.prod(shape) * dtype.itemsize, info.file_size - member.tell()
        if stated != there:
            raise _Damaged(f"{info.filename} states {stated:,} bytes of numbers and holds {there:,}")
        assert isinstance(member, zipfile.ZipExtFile)
        content = bytearray(stated)
        if member.readinto(content) != stated or member.read(1):
            raise _Damaged(f"{info.filename} is truncated")
    flat = np.frombuffer(content, dtype=dtype) if stated else np.empty(math.prod(shape), dtype)
    if dtype.kind == "U" and stated:
        largest = int(flat.view(np.dtype(np.uint32).newbyteorder(dtype.byteorder)).max())
        if largest > sys.maxunicode:
            raise _Damaged(f"{info.filename} is not Unicode text: it has characters beyond U+{sys.maxunicode:X}")
    return flat.reshape(shape[::-1]).T if is_fortran else flat.reshape(shape)


def _reason(problem: Exception) -> str:
    if isinstance(problem, MemoryError):
        return "there is not enough memory for it"
    if isinstance(problem, OSError) and problem.errno == errno.ELOOP:
        return "it is a link"
    return str(getattr(problem, "strerror", None) or problem)
