"""Where a kernel is written: a tensor in memory, or a memory-mapped .npy file.

A file is written under a temporary name and renamed when it is complete and on the disk, so that an
interrupted run leaves nothing that looks like a kernel. What a killed process left is removed by
the next one that writes the same file. The space is reserved first: a full disk would otherwise
kill the process in the middle of a page.
"""

from __future__ import annotations

import errno
import os
from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wellposed._io import Temporary, sweep
from wellposed.errors import InvalidArgument, InvalidType

#: Of the names of files that are not complete.
ENDING = "part"


class AbstractStorage(ABC):
    """Where one kernel goes. Opened by `with`; `target` is there inside, `result` after it."""

    target: Tensor

    @property
    @abstractmethod
    def result(self) -> Any:
        """What the caller gets."""

    def __enter__(self) -> AbstractStorage:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        return None


class MemoryStorage(AbstractStorage):
    """A tensor."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.target = torch.empty(shape, dtype=dtype, device=device)

    @property
    def result(self) -> Tensor:
        return self.target


class FileStorage(AbstractStorage):
    """A .npy file."""

    def __init__(self, path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._path, self._shape = path, shape
        self._dtype = torch.empty(0, dtype=dtype).numpy().dtype
        self._temporary: Temporary | None = None
        self._array: np.memmap | None = None

    def __enter__(self) -> FileStorage:
        sweep(self._path.parent, target=self._path.name, ending=ENDING)
        try:
            self._temporary = Temporary(self._path, ENDING)
            self._array = np.lib.format.open_memmap(self._temporary.path, mode="w+", dtype=self._dtype, shape=self._shape)
            _reserve(self._temporary.handle)
        except OSError as error:
            self._discard()
            raise self._refused(error) from error
        self.target = torch.from_numpy(self._array)
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self._discard()
            return
        assert self._array is not None and self._temporary is not None
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
        raise InvalidType(f"tangent_kernel: out must be the path of a .npy file, got {type(out).__name__}.")
    path = Path(out)
    if path.suffix != ".npy":
        raise InvalidArgument(f"tangent_kernel: out must end in .npy, got {str(out)!r}.")
    if not path.parent.is_dir():
        raise InvalidArgument(f"tangent_kernel: the folder of out={str(out)!r} does not exist. Create it first.")
    if path.is_dir():
        raise InvalidArgument(f"tangent_kernel: out={str(out)!r} is a folder. Give the name of a file in it.")
    if dtype not in (torch.float16, torch.float32, torch.float64):
        raise InvalidArgument(f"tangent_kernel: a .npy file cannot hold {dtype}. Use a float32 or float64 model.")
    return path


def file_of_parameter(out: Path, parameter: str) -> Path:
    """kernel.npy, W -> kernel.W.npy."""
    return out.with_name(f"{out.stem}.{parameter}.npy")


def write_block(target: Tensor, block: Tensor, rows: slice, columns: slice, *, symmetric: bool) -> int:
    """Put a block in its place and, in a symmetric kernel, its transpose in the other; returns the
    entries written.

    Args:
        target: (s, N, M) the kernel.
        block: (s, r, c) with its place given by `rows` and `columns`; below the diagonal or on it
            if `symmetric`.
    """
    if symmetric and rows == columns:
        # Rounding leaves products slightly asymmetric: the lower triangle decides.
        block = block.tril()
        diagonal = block.diagonal(dim1=1, dim2=2).clone()
        block = block + block.mT
        block.diagonal(dim1=1, dim2=2).copy_(diagonal)
    target[:, rows, columns].copy_(block)
    if symmetric and rows != columns:
        target[:, columns, rows].copy_(block.mT)
        return 2 * block.numel()
    return block.numel()
