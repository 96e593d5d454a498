"""A figure, and the records that are drawn on it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from wellposed.errors import InvalidArgument, InvalidType, required

#: Distinct also for most colour-blind readers (Okabe and Ito).
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")


def new_figure(width: float, height: float) -> Any:
    """An empty figure, in inches; raises `MissingPackage` without matplotlib."""
    figure = required("matplotlib.figure", "wellposed.plot needs matplotlib", extra="plot")
    return figure.Figure(figsize=(width, height), layout="constrained")


def record_of(record: Any, kind: str, fields: tuple[str, ...]) -> Mapping[str, Any]:
    """The record as plain Python; raises unless it has these fields."""
    if hasattr(record, "to_dict"):
        record = record.to_dict()
    if not isinstance(record, Mapping):
        raise InvalidType(f"plot needs a record of a {kind}, as an object or as its to_dict(); got {type(record).__name__}.")
    if missing := [name for name in fields if name not in record]:
        raise InvalidArgument(f"This is not a record of a {kind}: it has no {', '.join(missing)}.")
    return record


def array(values: Any) -> np.ndarray:
    """Numbers out of a record: null is NaN, and text such as "inf" a number."""

    def of(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [of(part) for part in value]
        return math.nan if value is None else float(value)

    return np.array(of(values), dtype=float) if isinstance(values, (list, tuple)) else np.asarray(values, dtype=float)
