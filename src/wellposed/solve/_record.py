"""What is kept of the solves of a layer."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass
class SolveRecord:
    """What the solves of one layer have shown.

    Attributes:
        solution: Of the last forward solve. adjoint: Of the last linear solve of a backward pass.
            Either may be what makes it, see `read_record`.
        failures: How many solves failed, by direction and cause.
        coupled: The training modes in which rows were found to depend on each other: batch
            statistics couple rows in one of them only. training: The mode of the last forward
            solve.
        warned: The training modes in which a warning about coupled rows was given.
        costs: `AbstractMap.cost` of the cell by training mode, shapes and dtype, once counted.
    """

    solution: Any = None  # a Solution, as the next
    adjoint: Any = None
    failures: Counter[str] = field(default_factory=Counter)
    coupled: set[bool] = field(default_factory=set)
    training: bool = False
    warned: set[bool] = field(default_factory=set)
    costs: dict[bool, dict[Any, float]] = field(default_factory=lambda: {True: {}, False: {}})
