"""A kernel in a zarr store: one chunk for each block, so that an interrupted computation continues.

The chunks are written into `kernel.zarr.part`, each whole or not at all, and the store gets its
name when it is complete. A fingerprint of the computation (parameters, inputs, blocks) is stored
with
them: chunks of another kernel are never taken over.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from wellposed._io import try_lock
from wellposed.errors import InvalidArgument, required
from wellposed.kernel._method import KernelLayout, KernelMethod
from wellposed.kernel._storage import AbstractStorage, symmetrized

_KEY = "wellposed"


class ZarrStorage(AbstractStorage):
    """A zarr array in a folder.

    Args:
        path: The folder, ending in .zarr.
        shape: (s, N, M) of the kernel.
        public: Shape of the array, (N, M) or (s, N, M).
        dtype: Of the array.
        block_size: Rows and columns of a chunk.
        key: The fingerprint of the computation.
    """

    def __init__(
        self, path: Path, shape: tuple[int, int, int], public: tuple[int, ...], dtype: torch.dtype, *, block_size: int, key: str
    ) -> None:
        self._zarr = required("zarr", "A kernel in a .zarr store needs zarr", extra="kernels")
        self._path, self._part, self._lock = path, path.with_name(f"{path.name}.part"), -1
        self._shape, self._public, self._block_size, self._key = shape, public, block_size, key
        self._dtype = torch.empty(0, dtype=dtype).numpy().dtype
        self._array: Any = None

    @property
    def part(self) -> Path:
        """The folder of the chunks until the store is complete."""
        return self._part

    def __enter__(self) -> ZarrStorage:
        try:
            if not self._part.exists():
                chunks = tuple(min(self._block_size, size) for size in self._shape[1:])
                self._zarr.create_array(
                    self._part,
                    shape=self._public,
                    chunks=(1,) * (len(self._public) - 2) + chunks,
                    dtype=self._dtype,
                    fill_value=float("nan"),
                    compressors=None,  # the digits of a kernel are noise to a compressor
                    attributes={_KEY: self._key},
                )
            self._array = self._zarr.open_array(self._part, mode="r+")
            self._lock = os.open(self._part, os.O_RDONLY) if os.name != "nt" else -1
        except (OSError, ValueError) as error:
            raise InvalidArgument(
                f"tangent_kernel: cannot write {str(self._part)!r} ({error}). Remove it, or choose another place."
            ) from error
        if self._array.attrs.get(_KEY) != self._key:
            raise InvalidArgument(
                f"tangent_kernel: {str(self._part)!r} holds a part of another kernel: the model, X, X2, block_size or dtype was"
                " another. Remove it, or choose another out."
            )
        with contextlib.suppress(OSError):  # a file system without locks
            if self._lock >= 0 and not try_lock(self._lock):
                raise InvalidArgument(f"tangent_kernel: another process is writing {str(self._part)!r}. Wait for it to end.")
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                if self._path.exists():
                    shutil.rmtree(self._path)
                self._part.rename(self._path)
        finally:
            if self._lock >= 0:
                os.close(self._lock)

    @property
    def result(self) -> Any:
        return self._zarr.open_array(self._path, mode="r+")

    def done(self, rows: slice, columns: slice, *, symmetric: bool) -> bool:
        """Whether the chunks of a block are there."""
        i, j = rows.start // self._block_size, columns.start // self._block_size
        places = {(i, j), (j, i)} if symmetric else {(i, j)}
        return all(self._chunk(k, *place).is_file() for place in places for k in range(self._shape[0]))

    def _chunk(self, k: int, i: int, j: int) -> Path:
        place = (i, j) if len(self._public) == 2 else (k, i, j)
        return self._part / self._array.metadata.encode_chunk_key(place)

    def write(self, block: Tensor, rows: slice, columns: slice, *, symmetric: bool) -> int:
        written = write_chunks(self._array, block, rows, columns, symmetric=symmetric)
        return written


def write_chunks(array: Any, block: Tensor, rows: slice, columns: slice, *, symmetric: bool) -> int:
    """Writes a block (s, r, c) and, in a symmetric kernel, its transpose; returns the entries."""
    if symmetric and rows == columns:
        block = symmetrized(block)
    squeezed = block if array.ndim == 3 else block[0]
    array[..., rows, columns] = squeezed.cpu().numpy()
    if symmetric and rows != columns:
        array[..., columns, rows] = squeezed.mT.contiguous().cpu().numpy()
        return 2 * block.numel()
    return block.numel()


def fingerprint(chosen: KernelMethod, layout: KernelLayout, X: Tensor, X2: Tensor | None, block_size: int) -> str:
    """A hash of everything that the numbers of a kernel depend on, besides the processor."""
    model: Any = chosen.model
    settings = (type(chosen).__name__, type(model).__name__, repr(model), chosen.parameters, chosen.shape(layout), chosen.dtype)
    found = hashlib.sha256(repr((*settings, layout, block_size, X2 is None)).encode())
    tensors = {**model.state_dict(), "X": X} | ({} if X2 is None else {"X2": X2})
    for name, value in sorted(tensors.items()):
        found.update(repr((name, tuple(value.shape), value.dtype)).encode())
        found.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
