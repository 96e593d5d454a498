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
    """The same for one process; 0 if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return 0.0
    return TICK * (int(fields[11]) + int(fields[12]))  # user and system time


def others_during(pid: int, action: Callable[[], T]) -> tuple[T, bool]:
    """Do `action` while process `pid` computes; say whether any other process computed much meanwhile."""
    if not STAT.exists():
        return action(), False
    began, before = time.monotonic(), busy_seconds() - process_seconds(pid)
    result = action()
    others = busy_seconds() - process_seconds(pid) - before
    # 15 % of a core; and in a short run the clock of the system, which ticks in hundredths, must not decide.
    return result, others > 0.15 * (time.monotonic() - began) + 3 * TICK


class Watch:
    """Repeats disturbed measurements for as long as `patience` seconds last; then it counts them."""

    def __init__(self, patience: float) -> None:
        self.patience, self.runs, self.disturbed = patience, 0, 0

    def undisturbed(self, pid: int, measure: Callable[[], T]) -> T:
        """What `measure` returns; process `pid` is the one that computes meanwhile."""
        self.runs += 1
        while True:
            result, disturbed = others_during(pid, measure)
            if not disturbed:
                return result
            if self.patience <= 0.0:
                self.disturbed += 1
                return result
            self._wait_for_quiet(pid)

    def _wait_for_quiet(self, pid: int) -> None:
        began = time.monotonic()
        while others_during(pid, lambda: time.sleep(0.5))[1] and time.monotonic() - began < self.patience:
            pass
        self.patience -= time.monotonic() - began
