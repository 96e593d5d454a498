"""What a certificate may license: numbers that float64 holds, strictly on the right side."""

from __future__ import annotations

import math
from collections.abc import Mapping

__all__ = ["OUT_OF_RANGE", "license_fault"]

OUT_OF_RANGE = "The numbers leave the range of float64"


def license_fault(
    dynamics: str,
    step_size: float | Mapping[str, float] | None,
    rates: Mapping[str, float] | None,
    rate: float | None,
    radii: Mapping[str, float] | None,
) -> str:
    """Which of the licensed numbers proves nothing, in words; empty if none.

    Steps and relative rates are finite and positive, radii finite and not negative. A rate of descent lies in [0, 1) and one
    of the flow is positive: q = 1 and s = 0 say that the residual does not grow, not that it vanishes.
    """
    for name, table in (("step size", step_size), ("relative rate", rates)):
        for key, number in _items(table):
            if not 0 < number < math.inf:
                return f"the {name}{key} would be {number:.3g}, not finite and positive: rescale the inputs and the labels"
    for key, number in _items(radii):
        if not 0 <= number < math.inf:
            return f"the radius{key} would be {number:.3g}, not finite: rescale the inputs and the labels"
    if rate is not None and dynamics == "descent" and not 0 <= rate < 1:
        return f"the rate of descent would be {rate:.17g}: a step gains less than float64 resolves"
    if rate is not None and dynamics == "flow" and not 0 < rate < math.inf:
        return f"the rate of the flow would be {rate:.3g}, not finite and positive: rescale the inputs and the labels"
    return ""


def _items(table: float | Mapping[str, float] | None) -> list[tuple[str, float]]:
    if table is None:
        return []
    return [(f" of {name}", number) for name, number in table.items()] if isinstance(table, Mapping) else [("", table)]
