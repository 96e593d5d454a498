"""How much memory a kernel will take, said before the work starts, and how much there is."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from wellposed.errors import InvalidArgument


@dataclass(frozen=True)
class KernelMemory:
    """Estimated bytes of a kernel computation, beyond the data and the parameters.

    Attributes:
        kernel: The result, where it lives in memory.
        features: What is kept of every sample (closed form), or of a block of samples (rows of the
            Jacobian).
        blocks: Buffers for blocks of the kernel.
        work: What the network itself takes to compute features of one batch of rows; the roughest
            part of the estimate.
        disk: The result, where it lives in files.
    """

    kernel: int
    features: int
    blocks: int
    work: int
    disk: int = 0

    @property
    def total(self) -> int:
        """All but the disk."""
        return self.kernel + self.features + self.blocks + self.work

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {readable(getattr(self, name))}" for name in ("kernel", "features", "blocks", "work"))
        disk = f"; on disk {readable(self.disk)}" if self.disk else ""
        return f"{readable(self.total)} of memory ({parts}){disk}"

    def check(self, limit: int | None, device: torch.device, *, advice: str) -> None:
        """Raise unless the estimate is within `limit`, or within what is available if there is no
        limit."""
        have = available_memory(device) if limit is None else limit
        if have is not None and self.total > have:
            source = "available" if limit is None else "allowed by memory="
            raise InvalidArgument(f"tangent_kernel: needs about {self}, but {readable(have)} are {source}. {advice}")

    def check_disk(self, folder: Path) -> None:
        free = shutil.disk_usage(folder).free
        if self.disk > free:
            raise InvalidArgument(
                f"tangent_kernel: out needs {readable(self.disk)} in {str(folder)!r}, where {readable(free)} are free. "
                "Free some, choose another folder, or use float32."
            )


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
