"""Which blocks of an unfinished kernel are done, with a digest of the numbers of each: a block that
was changed since is computed again."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Any

import numpy as np

from wellposed._io import open_plain
from wellposed._reading import read_bytes
from wellposed.errors import InvalidArgument
from wellposed.kernel._zarr_checks import RECORD

#: Largest size in bytes of a record: five million blocks. n = 10^6 has 30,000 of 4096 rows, and 1.9 million of 512.
_LARGEST = 2**28
_LINE = re.compile(rb"(\d{1,12}) (\d{1,12}) ([0-9a-f]{32})")


class BlockRecord:
    """A file with a line for every block that is done: first row, first column, digest.

    Lines are appended, and one that is not whole is not read: a block of which the line was lost is
    computed again.

    Args:
        part: The folder of the chunks.
    """

    def __init__(self, part: Path) -> None:
        path = part / RECORD
        content = read_bytes(path, limit=_LARGEST, error=InvalidArgument, within=part) or b""
        found = (_LINE.fullmatch(line) for line in content.split(b"\n"))
        self._digests = {(int(line[1]), int(line[2])): line[3].decode() for line in found if line is not None}
        self._handle = open_plain(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        if content and not content.endswith(b"\n"):
            os.write(self._handle, b"\n")

    def digest(self, rows: slice, columns: slice) -> str | None:
        """Of a block; None if it is not done."""
        return self._digests.get((rows.start, columns.start))

    def add(self, rows: slice, columns: slice, digest: str) -> None:
        """A block is done."""
        os.write(self._handle, f"{rows.start} {columns.start} {digest}\n".encode())
        self._digests[rows.start, columns.start] = digest

    def close(self) -> None:
        os.close(self._handle)


def digest_of(parts: list[np.ndarray]) -> str:
    """Of the numbers of a block and, in a symmetric kernel, of its transpose."""
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        found.update(np.ascontiguousarray(part).data)
    return found.hexdigest()


def stored_digest(array: Any, rows: slice, columns: slice, *, symmetric: bool) -> str | None:
    """The digest of what a zarr array holds in the place of a block; None if it cannot be read."""
    places = [(rows, columns)] + [(columns, rows)] * (symmetric and rows != columns)
    try:
        return digest_of([np.asarray(array[..., a, b]) for a, b in places])
    except (OSError, ValueError):  # a chunk that is too short, or a folder
        return None
