"""NumPy archives of unknown origin: no pickle, and no array larger than its header and the archive agree on."""

from __future__ import annotations

import math
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.lib import format as npy

from wellposed._reading import opened
from wellposed.errors import WellposedError

__all__ = ["read_arrays"]

#: Bytes of the list of members, which zipfile reads as a whole; a member takes about 60.
DIRECTORY = 1 << 20
#: The end record of an archive, and the longest comment behind it.
_END, _COMMENT = 22, 1 << 16
#: How members may be compressed: of all other methods zipfile unpacks whole blocks, whatever size the archive states.
_BOUNDED = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)


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
    """The arrays of an .npz file by name; None if there is no such file.

    The sizes that the archive states are checked before anything is decompressed, and each array must have the size that its
    header states. Objects, which need pickle, and encrypted members are refused.

    Args:
        path: The file; links are followed.
        limit: The largest size in bytes of the file, and of all arrays together.
        error: The class of every refusal.
        says: The refusal of what is not such an archive, with {path} and {reason}.
        names: Which arrays, or a function that chooses from the names that are there; all if not given. Those that are not
            there are left out.
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
    """Refuses a list of members that would fill the memory; zipfile looks for its end record in these two places."""
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
    if (
        dtype.kind == "U"
        and stated
        and int(flat.view(np.dtype(np.uint32).newbyteorder(dtype.byteorder)).max()) > sys.maxunicode
    ):
        raise _Damaged(f"{info.filename} is not Unicode text: it has characters beyond U+{sys.maxunicode:X}")
    return flat.reshape(shape[::-1]).T if is_fortran else flat.reshape(shape)
