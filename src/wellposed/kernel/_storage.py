"""Where a kernel is written: a tensor in memory, or a memory-mapped .npy file (`_zarr` has stores).

A file is written under a temporary name and renamed when it is complete and on the disk, so that an
interrupted run leaves nothing that looks like a kernel. What a killed process left is removed by
the next one that writes the same file. The space is reserved first: a full disk would otherwise
kill the process in the middle of a page.
"""

from __future__ import annotations

import errno
import mmap
import os
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wellposed._io import Temporary, sweep
from wellposed.errors import InvalidArgument, InvalidType
from wellposed.kernel._zarr_checks import check_replaceable

#: Of the names of files that are not complete.
ENDING = "part"
#: Bytes of a file that are mapped at once.
MAPPED = 2**26


class AbstractStorage(ABC):
    """Where one kernel goes. Opened by `with`; it is written inside, `result` is there after it."""

    #: (s, N, M) the kernel, if it is a tensor or a mapped file.
    target: Tensor

    @property
    @abstractmethod
    def result(self) -> Any:
        """What the caller gets."""

    def write(self, block: Tensor, rows: slice, columns: slice, *, symmetric: bool) -> int:
        """Puts a block (s, r, c) in its place, see `write_block`; returns the entries written."""
        return write_block(self.target, block, rows, columns, symmetric=symmetric)

    def done(self, rows: slice, columns: slice, *, symmetric: bool) -> bool:
        """Whether the block is there from an earlier run."""
        return False

    def __enter__(self) -> AbstractStorage:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        return None


class MemoryStorage(AbstractStorage):
    """A tensor."""

    def __init__(self, shape: tuple[int, int, int], public: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.target = torch.empty(shape, dtype=dtype, device=device)
        self._public = public

    @property
    def result(self) -> Tensor:
        return self.target.view(self._public)


class FileStorage(AbstractStorage):
    """A .npy file."""

    def __init__(self, path: Path, shape: tuple[int, int, int], public: tuple[int, ...], dtype: torch.dtype) -> None:
        self._path, self._shape, self._public = path, shape, public
        self._dtype = torch.empty(0, dtype=dtype).numpy().dtype
        self._temporary: Temporary | None = None
        self._array: np.memmap | None = None
        self._mapped = 0

    def __enter__(self) -> FileStorage:
        sweep(self._path.parent, target=self._path.name, ending=ENDING)
        try:
            self._temporary = Temporary(self._path, ENDING)
            self._array = np.lib.format.open_memmap(self._temporary.path, mode="w+", dtype=self._dtype, shape=self._public)
            _reserve(self._temporary.handle)
        except OSError as error:
            self._discard()
            raise self._refused(error) from error
        self.target = torch.from_numpy(self._array).view(self._shape)
        return self

    def write(self, block: Tensor, rows: slice, columns: slice, *, symmetric: bool) -> int:
        written = super().write(block, rows, columns, symmetric=symmetric)
        self._mapped += written * block.element_size()
        if self._mapped > MAPPED and sys.platform == "linux":
            # What is mapped counts as memory of the process: given back, and written to the disk by the system in its time.
            assert self._array is not None
            self._array._mmap.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]
            self._mapped = 0
        return written

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self._discard()
            return
        assert self._array is not None and self._temporary is not None
        del self.target
        try:
            self._array.flush()
            self._temporary.commit()
        except OSError as error:
            self._discard()
            raise self._refused(error) from error
        self._array = None

    @property
    def result(self) -> np.memmap:
        # Opened again: the mapping made for writing has the temporary name.
        return np.lib.format.open_memmap(self._path, mode="r+")

    def _discard(self) -> None:
        self._array = None
        if self._temporary is not None:
            self._temporary.discard()

    def _refused(self, error: OSError) -> InvalidArgument:
        return InvalidArgument(
            f"tangent_kernel: cannot write out={str(self._path)!r} ({error.strerror}). Choose another place."
        )


def _reserve(handle: int) -> None:
    """Allocate the blocks of a sparse file, where the file system can."""
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(handle, 0, os.fstat(handle).st_size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise


def check_target(out: Any, dtype: torch.dtype) -> Path | None:
    """`out` as a path in a folder that exists; None stays None."""
    if out is None:
        return None
    if not isinstance(out, (str, os.PathLike)):
        raise InvalidType(f"tangent_kernel: out must be the path of a .npy file or a .zarr store, got {type(out).__name__}.")
    path = Path(out)
    if path.suffix not in (".npy", ".zarr"):
        raise InvalidArgument(f"tangent_kernel: out must end in .npy or .zarr, got {str(out)!r}.")
    if not path.parent.is_dir():
        raise InvalidArgument(f"tangent_kernel: the folder of out={str(out)!r} does not exist. Create it first.")
    if path.suffix == ".npy" and path.is_dir():
        raise InvalidArgument(f"tangent_kernel: out={str(out)!r} is a folder. Give the name of a file in it.")
    if path.suffix == ".zarr":
        check_replaceable(path)
    if dtype not in (torch.float16, torch.float32, torch.float64):
        raise InvalidArgument(f"tangent_kernel: a {path.suffix} file cannot hold {dtype}. Use a float32 or float64 model.")
    return path


def file_of_parameter(out: Path, parameter: str) -> Path:
    """kernel.npy, W -> kernel.W.npy."""
    return out.with_name(f"{out.stem}.{parameter}{out.suffix}")


def write_block(target: Tensor, block: Tensor, rows: slice, columns: slice, *, symmetric: bool) -> int:
    """Put a block in its place and, in a symmetric kernel, its transpose in the other; returns the
    entries written.

    Args:
        target: (s, N, M) the kernel.
        block: (s, r, c) with its place given by `rows` and `columns`; below the diagonal or on it
            if `symmetric`.
    """
    if symmetric and rows == columns:
        block = symmetrized(block)
    target[:, rows, columns].copy_(block)
    if symmetric and rows != columns:
        target[:, columns, rows].copy_(block.mT)
        return 2 * block.numel()
    return block.numel()


def symmetrized(block: Tensor) -> Tensor:
    """A block (s, r, r) on the diagonal, exactly symmetric: rounding leaves products slightly
    asymmetric, and the lower triangle decides."""
    block = block.tril()
    diagonal = block.diagonal(dim1=1, dim2=2).clone()
    block = block + block.mT
    block.diagonal(dim1=1, dim2=2).copy_(diagonal)
    return block
