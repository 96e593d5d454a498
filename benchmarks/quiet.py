"""Wait for a quiet machine: with every core needed, a neighbour does not add noise, it multiplies times."""

from __future__ import annotations

import time
from pathlib import Path

STAT = Path("/proc/stat")
QUIET = 0.15  # cores in use by others


def busy_cores(seconds: float = 0.25) -> float:
    """Cores in use while this process and its workers sleep; 0 where the system does not tell."""
    if not STAT.exists():
        return 0.0

    def ticks() -> tuple[int, int]:
        values = [int(word) for word in STAT.read_text().splitlines()[0].split()[1:9]]
        return sum(values) - values[3] - values[4], sum(values)  # 3 and 4: idle and waiting for input

    cores = sum(line.startswith("cpu") for line in STAT.read_text().splitlines()) - 1
    busy_before, all_before = ticks()
    time.sleep(seconds)
    busy, everything = ticks()
    return cores * (busy - busy_before) / max(1, everything - all_before)


def wait(patience: float) -> tuple[float, float]:
    """Return when the machine is quiet or `patience` seconds are over: (cores in use, patience left)."""
    end = time.monotonic() + patience
    while (busy := busy_cores()) > QUIET and time.monotonic() < end:
        time.sleep(0.5)
    return busy, max(0.0, end - time.monotonic())
