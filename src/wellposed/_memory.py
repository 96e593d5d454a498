"""How much memory there is, and one sentence where it does not suffice."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from wellposed.errors import InvalidArgument

#: More samples than any memory holds; NumPy refuses arrays of many more in other words.
MOST = 2**40


def readable(size: int) -> str:
    """1536 -> '1.5 KiB'."""
    if size < 1024:
        return f"{size} bytes"
    power = min((size.bit_length() - 1) // 10, 4)
    return f"{size / 1024**power:.4g} {('KiB', 'MiB', 'GiB', 'TiB')[power - 1]}"


def available_memory(device: torch.device) -> int | None:
    """Bytes that could be allocated now without swapping; None where it is not known."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    found = [size for size in (_of_the_machine(), _of_the_group()) if size is not None]
    return min(found, default=None)


def _of_the_machine() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return None


def _of_the_group() -> int | None:
    """What the control group (a container) leaves, if there is one with a limit."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit = int((folder / "memory.max").read_text())
        # Cached files count as used, but give way.
        cached = [line.split() for line in (folder / "memory.stat").read_text().splitlines()]
        files = sum(int(size) for name, size in cached if name in ("inactive_file", "active_file"))
        return limit - int((folder / "memory.current").read_text()) + files
    except (OSError, ValueError):
        return None


@contextmanager
def enough_memory(n: int | None, n_test: int | None) -> Iterator[None]:
    """Raises `InvalidArgument` where the memory does not hold so many samples."""
    try:
        if max(n or 0, n_test or 0) > MOST:
            raise MemoryError
        yield
    except MemoryError as error:
        raise InvalidArgument(f"The memory does not hold n={n} and n_test={n_test} samples; take fewer.") from error
