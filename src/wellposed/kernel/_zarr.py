"""A kernel in a zarr store: one chunk for each block, so that an interrupted computation continues.

The chunks are written into `kernel.zarr.part`, each whole or not at all, and the store gets its
name when it is complete. A fingerprint of the computation (parameters, inputs, blocks) is stored
with them, and so are the norms of the first features and the coefficients of the terms: chunks of
another kernel are never taken over. A record has a digest of every block that is done: what was
changed since is computed again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
import stat
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from wellposed._io import is_at, try_lock
from wellposed.errors import InvalidArgument, required
from wellposed.kernel._method import KernelLayout, KernelMethod
from wellposed.kernel._storage import AbstractStorage, symmetrized
from wellposed.kernel._zarr_checks import (
    BEFORE,
    FEATURES,
    KEY,
    METADATA,
    NORMS,
    RECORD,
    check_folder,
    check_part,
    check_replaceable,
    is_empty,
)
from wellposed.kernel._zarr_record import BlockRecord, digest_of, stored_digest


class ZarrStorage(AbstractStorage):
    """A zarr array in a folder.

    Args:
        path: The folder, ending in .zarr.
        shape: (s, N, M) of the kernel.
        public: Shape of the array, (N, M) or (s, N, M).
        dtype: Of the array.
        block_size: Rows and columns of a chunk.
        key: The fingerprint of the computation.
        norms: Of the first features, and the coefficients of the terms: what the fingerprint cannot
            see of a network, for example its activation, changes them. Compared with a tolerance,
            because some networks compute them by an SVD.
        continues: Whether blocks are independent, so that those that are done need not be again.
    """

    def __init__(
        self,
        path: Path,
        shape: tuple[int, int, int],
        public: tuple[int, ...],
        dtype: torch.dtype,
        *,
        block_size: int,
        key: str,
        norms: tuple[float, ...] = (),
        continues: bool = True,
    ) -> None:
        self._zarr = required("zarr", "A kernel in a .zarr store needs zarr", extra="kernels")
        self._path, self._part, self._lock = path, path.with_name(f"{path.name}.part"), -1
        self._shape, self._public, self._block_size, self._key, self._norms = shape, public, block_size, key, norms
        self._dtype = torch.empty(0, dtype=dtype).numpy().dtype
        self._array: Any = None
        self._continues = continues
        self._record: BlockRecord | None = None

    @property
    def part(self) -> Path:
        """The folder of the chunks until the store is complete."""
        return self._part

    @property
    def key(self) -> str:
        """The fingerprint of the computation."""
        return self._key

    def __enter__(self) -> ZarrStorage:
        check_replaceable(self._path)
        check_folder(self._part)
        try:
            self._part.mkdir(exist_ok=True)
            self._lock = os.open(self._part, os.O_RDONLY) if os.name != "nt" else -1
            self._check_alone()  # first: another process may be at the next lines
            if is_empty(self._part):
                self._create(self._part)
            check_part(self._part, self._metadata(), rtol=1e-3 if self._dtype.itemsize < 8 else 1e-6)
            self._array = self._zarr.open_array(self._part, mode="r+")
            self._record = BlockRecord(self._part) if self._continues else None
        except (OSError, ValueError) as error:
            self._unlock()
            if isinstance(error, InvalidArgument):
                raise
            raise InvalidArgument(
                f"tangent_kernel: cannot write {str(self._part)!r} ({error}). Remove it, or choose another place."
            ) from error
        except BaseException:
            self._unlock()
            raise
        return self

    def _metadata(self) -> dict[str, Any]:
        """What describes the array, as zarr writes it."""
        memory: dict[str, Any] = {}
        self._create(memory)
        found: dict[str, Any] = json.loads(memory[METADATA].to_bytes())
        return found

    def _create(self, where: Path | dict[str, Any]) -> None:
        chunks = tuple(min(self._block_size, size) for size in self._shape[1:])
        self._zarr.create_array(
            where,
            shape=self._public,
            chunks=(1,) * (len(self._public) - 2) + chunks,
            dtype=self._dtype,
            fill_value=float("nan"),
            compressors=None,  # the digits of a kernel are noise to a compressor
            attributes={KEY: self._key, NORMS: list(self._norms)},
        )

    def _check_alone(self) -> None:
        """Raises unless this process alone writes the part."""
        with contextlib.suppress(OSError):  # a file system without locks
            if self._lock >= 0 and not (try_lock(self._lock) and is_at(self._lock, self._part)):
                raise InvalidArgument(f"tangent_kernel: another process is writing {str(self._part)!r}. Wait for it to end.")

    def _unlock(self) -> None:
        if self._record is not None:
            self._record.close()
            self._record = None
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._unlock()

    def _finish(self) -> None:
        """Gives the store its name; the one before is removed last, from inside the new one."""
        for left in self._part.rglob("*.partial"):  # a process was killed while it wrote this chunk
            left.unlink()
        for name in (FEATURES, BEFORE):
            shutil.rmtree(self._part / name, ignore_errors=True)
        (self._part / RECORD).unlink(missing_ok=True)
        if self._path.exists():
            self._path.rename(self._part / BEFORE)
        self._part.rename(self._path)
        shutil.rmtree(self._path / BEFORE, ignore_errors=True)

    @property
    def result(self) -> Any:
        return self._zarr.open_array(self._path, mode="r+")

    def done(self, rows: slice, columns: slice, *, symmetric: bool) -> bool:
        """Whether a block is there, with the numbers that were written."""
        digest = self.recorded(rows, columns)
        return digest is not None and digest == stored_digest(self._array, rows, columns, symmetric=symmetric)

    def recorded(self, rows: slice, columns: slice) -> str | None:
        """The digest of a block that was written; None without one."""
        return None if self._record is None else self._record.digest(rows, columns)

    def record(self, rows: slice, columns: slice, digest: str) -> None:
        """A block was written, here or by a worker."""
        if self._record is not None:
            self._record.add(rows, columns, digest)

    def present(self, rows: slice, columns: slice, *, symmetric: bool) -> bool:
        """Whether the chunks of a block are there, as long as they must be; nothing is read."""
        i, j = rows.start // self._block_size, columns.start // self._block_size
        places = {(i, j), (j, i)} if symmetric else {(i, j)}
        return all(self._is_whole(k, *place) for place in places for k in range(self._shape[0]))

    def _is_whole(self, k: int, i: int, j: int) -> bool:
        place = (i, j) if len(self._public) == 2 else (k, i, j)
        chunk = self._part / self._array.metadata.encode_chunk_key(place)
        try:
            found = chunk.lstat()
            return stat.S_ISREG(found.st_mode) and found.st_size == math.prod(self._array.chunks) * self._dtype.itemsize
        except OSError:
            return False

    def write(self, block: Tensor, rows: slice, columns: slice, *, symmetric: bool) -> int:
        self.record(rows, columns, write_chunks(self._array, block, rows, columns, symmetric=symmetric))
        return block.numel() * (2 if symmetric and rows != columns else 1)


def open_part(part: str, key: str) -> Any:
    """The store of another process, to write blocks of the kernel of this key."""
    import zarr

    array = zarr.open_array(part, mode="r+")
    if array.attrs.get(KEY) != key:
        raise InvalidArgument(f"tangent_kernel: {part!r} belongs to another kernel by now. Compute this one into another out.")
    return array


def write_chunks(array: Any, block: Tensor, rows: slice, columns: slice, *, symmetric: bool) -> str:
    """Writes a block (s, r, c) and, in a symmetric kernel, its transpose; returns their digest."""
    if symmetric and rows == columns:
        block = symmetrized(block)
    squeezed = block if array.ndim == 3 else block[0]
    written = [squeezed.contiguous().cpu().numpy()]
    array[..., rows, columns] = written[0]
    if symmetric and rows != columns:
        written.append(squeezed.mT.contiguous().cpu().numpy())
        array[..., columns, rows] = written[1]
    return digest_of(written)


def fingerprint(chosen: KernelMethod, layout: KernelLayout, X: Tensor, X2: Tensor | None, block_size: int) -> str:
    """A hash of everything that the numbers of a kernel depend on, besides the processor and what
    is in no tensor of the model."""
    model: Any = chosen.model
    form = (chosen.parameters, chosen.factors, chosen.shape(layout), chosen.dtype)
    settings = (type(chosen).__name__, type(model).__name__, repr(model), *form)
    found = hashlib.sha256(repr((*settings, layout, block_size, X2 is None)).encode())
    named = sorted([*model.named_parameters(), *model.named_buffers()], key=lambda pair: pair[0])
    for name, value in [("inputs", X), *([] if X2 is None else [("inputs 2", X2)]), *named]:
        found.update(repr((name, tuple(value.shape), value.dtype)).encode())
        found.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
