"""One module per library. Each has CONTENDERS: {name: prepare}, where prepare(arrays) gives run() -> Run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass
class Run:
    """One timed solve and gradient. Arrays are whatever `numpy.asarray` takes; the floor has none."""

    forward_seconds: float
    total_seconds: float
    z: Any = None
    dW: Any = None
    dU: Any = None
    da: Any = None
    forward_steps: int | None = None
    adjoint_steps: int | None = None
    note: str = ""
