"""How much memory a kernel will take, said before the work starts."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from wellposed._memory import available_memory, readable
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
