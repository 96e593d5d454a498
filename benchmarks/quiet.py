"""Notice when somebody else computed during a measurement, and repeat it.

With every core in use, a neighbour does not add noise to a time, it multiplies it, and not for all alike.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
STAT = Path("/proc/stat")
TICK = 1.0 / os.sysconf("SC_CLK_TCK")


def busy_seconds() -> float:
    """Seconds that all cores together have computed since the start of the machine."""
    user, nice, system, _, _, irq, softirq, steal = STAT.read_text().splitlines()[0].split()[1:9]
    return TICK * sum(map(int, (user, nice, system, irq, softirq, steal)))


def process_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return TICK * (int(fields[11]) + int(fields[12]))  # user and system time


class Watch:
    """Repeats disturbed measurements for as long as `patience` seconds last; then it counts them."""

    def __init__(self, patience: float) -> None:
        self.patience, self.runs, self.disturbed = patience, 0, 0

    def undisturbed(self, pid: int, measure: Callable[[], T]) -> T:
        """What `measure` returns; process `pid` is the one that computes meanwhile."""
        self.runs += 1
        while True:
            began = time.monotonic()
            result, others = self._others_during(pid, measure)
            # A process must have taken 15 % of a core, or be too short for the clock of the system to tell.
            if others <= 0.15 * (time.monotonic() - began) + 3 * TICK:
                return result
            if self.patience <= 0.0:
                self.disturbed += 1
                return result
            time.sleep(min(1.0, self.patience))
            self.patience -= time.monotonic() - began

    @staticmethod
    def _others_during(pid: int, measure: Callable[[], T]) -> tuple[T, float]:
        if not STAT.exists():
            return measure(), 0.0
        before = busy_seconds() - process_seconds(pid)
        result = measure()
        try:
            return result, busy_seconds() - process_seconds(pid) - before
        except FileNotFoundError:  # it died, which is told elsewhere
            return result, 0.0
