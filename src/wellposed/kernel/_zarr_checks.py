"""What lies where a zarr store is to be written: only what a kernel wrote is replaced or continued.

Nothing is opened by zarr before it passed: its metadata decide which bytes are read, as what.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from wellposed._reading import read_object
from wellposed.errors import InvalidArgument

#: Attributes of the array: the fingerprint of the computation, and norms of the first features.
KEY, NORMS = "wellposed", "norms"
#: Folders inside that of the chunks: features while a cluster computes, and a store that is being replaced.
FEATURES, BEFORE = "features", "before"
#: The file with the blocks that are done.
RECORD = "blocks.txt"
#: What describes the array, and its largest size in bytes: norms are the longest part of it.
METADATA, _LARGEST = "zarr.json", 2**22
_CHUNKS, _PARTIAL = "c", ".partial"


def check_replaceable(path: Path) -> None:
    """Raises `InvalidArgument` unless there is nothing at a path, or a kernel and nothing else."""
    if not os.path.lexists(path):
        return
    if path.is_symlink():
        raise InvalidArgument(
            f"tangent_kernel: out={str(path)!r} is a link, which is not followed. Give the name of the store."
        )
    if not (path / METADATA).is_file():
        raise InvalidArgument(f"tangent_kernel: out={str(path)!r} exists and is not a zarr store. Choose another name.")
    found = _metadata(path)
    attributes = found.get("attributes")
    if found.get("node_type") != "array" or not isinstance(attributes, dict) or not isinstance(attributes.get(KEY), str):
        raise InvalidArgument(
            f"tangent_kernel: out={str(path)!r} is a zarr store that no kernel wrote, and is not replaced. Choose another name."
        )
    # features: of a task of a cluster that was still running when the store got its name
    if foreign := next(_foreign(path, {METADATA, _CHUNKS, BEFORE, FEATURES}), ""):
        raise InvalidArgument(
            f"tangent_kernel: out={str(path)!r} holds {foreign}, which no kernel wrote. It is not replaced; choose another."
        )


def check_folder(part: Path) -> None:
    """Raises `InvalidArgument` if a link or a file is in the place of a folder."""
    if os.path.lexists(part) and (part.is_symlink() or not part.is_dir()):
        raise InvalidArgument(
            f"tangent_kernel: cannot write {str(part)!r} (it is not a folder). Remove it, or choose another out."
        )


def is_empty(part: Path) -> bool:
    """Whether a folder has no more in it than what a process left that was killed at its start."""
    return all(_is_partial(entry) and entry.is_file(follow_symlinks=False) for entry in _entries(part))


def check_part(part: Path, expected: Mapping[str, Any], rtol: float) -> None:
    """Raises `InvalidArgument` unless a folder is a part of the kernel in question.

    Args:
        part: The folder.
        expected: What its metadata must be, to the letter but for the norms.
        rtol: Of the norms.
    """
    check_folder(part)
    if foreign := next(_foreign(part, {METADATA, RECORD, _CHUNKS, FEATURES, BEFORE}), ""):
        raise InvalidArgument(f"tangent_kernel: {str(part)!r} holds {foreign}, which no kernel wrote. Remove it.")
    found = _metadata(part)
    attributes, wanted = found.get("attributes"), expected["attributes"]
    same = isinstance(attributes, dict) and attributes.get(KEY) == wanted[KEY]
    if not (same and isinstance(attributes, dict) and _are_close(attributes.get(NORMS), wanted[NORMS], rtol)):
        raise InvalidArgument(
            f"tangent_kernel: {str(part)!r} holds a part of another kernel: the model, X, X2, block_size or dtype was"
            " another. Remove it, or choose another out."
        )
    found["attributes"] = {**attributes, NORMS: wanted[NORMS]}
    wrong = [name for name in sorted({*found, *expected}) if name not in found or found[name] != expected.get(name)]
    if wrong:
        raise InvalidArgument(
            f"tangent_kernel: {METADATA} of {str(part)!r} is not as a kernel writes it ({', '.join(wrong)[:100]}). Remove it."
        )


def _are_close(found: Any, wanted: list[float], rtol: float) -> bool:
    if not isinstance(found, list) or len(found) != len(wanted):
        return False
    return all(
        isinstance(a, float) and (math.isclose(a, b, rel_tol=rtol) or (math.isnan(a) and math.isnan(b)))
        for a, b in zip(found, wanted, strict=True)
    )


def _metadata(folder: Path) -> dict[str, Any]:
    found = read_object(folder / METADATA, limit=_LARGEST, error=InvalidArgument, within=folder)
    if found is None:
        raise InvalidArgument(f"tangent_kernel: {str(folder)!r} exists and is not a zarr store. Remove it.")
    return found


def _foreign(folder: Path, known: set[str]) -> Iterator[str]:
    """Names in a store that are not those of a kernel, or not regular files and folders."""
    for entry in _entries(folder):
        if entry.is_dir(follow_symlinks=False) and entry.name in known - {METADATA, RECORD}:
            if entry.name == BEFORE:
                yield from _foreign(Path(entry.path), {METADATA, _CHUNKS, BEFORE, FEATURES})
            else:
                yield from _foreign_below(Path(entry.path), chunks=entry.name == _CHUNKS)
        elif not (entry.is_file(follow_symlinks=False) and (entry.name in {METADATA, RECORD} & known or _is_partial(entry))):
            yield repr(entry.name)


def _foreign_below(folder: Path, *, chunks: bool) -> Iterator[str]:
    for entry in _entries(folder):
        if entry.is_dir(follow_symlinks=False):
            yield from _foreign_below(Path(entry.path), chunks=chunks)
        elif not entry.is_file(follow_symlinks=False) or (chunks and not _is_chunk(entry.name)):
            yield repr(os.path.join(folder.name, entry.name))


def _is_partial(entry: os.DirEntry[str]) -> bool:
    return entry.name.endswith(_PARTIAL)


def _is_chunk(name: str) -> bool:
    return (name.isascii() and name.isdigit()) or name.endswith(_PARTIAL)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return list(found)
    except OSError as error:
        raise InvalidArgument(
            f"tangent_kernel: {str(folder)!r} cannot be read ({error.strerror}). Choose another out."
        ) from error
