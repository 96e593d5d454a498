"""Exponents of power laws."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

__all__ = ["slope"]


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """The exponent p of y = c x^p, by least squares in logarithms.

    >>> round(slope([1, 2, 4], [3, 12, 48]), 12)
    2.0
    """
    return statistics.linear_regression([math.log(v) for v in x], [math.log(v) for v in y]).slope
