"""Bounds with six decimal digits: a proof stores these, and a seventh digit is not valid there.

A bound that is only compared with one computed in another way could be changed a little without
being noticed. With six digits a small change is not a number of a proof, and a larger one is
noticed.
"""

from __future__ import annotations

from decimal import ROUND_CEILING, ROUND_FLOOR, Context

_DIGITS = 6
_CEILING, _FLOOR = (Context(prec=_DIGITS, rounding=side) for side in (ROUND_CEILING, ROUND_FLOOR))


def short_up(x: float) -> float:
    """The least number of six digits that is not below x, a finite number."""
    return float(_CEILING.create_decimal_from_float(x))


def short_down(x: float) -> float:
    """The largest number of six digits that is not above x, a finite number."""
    return float(_FLOOR.create_decimal_from_float(x))
