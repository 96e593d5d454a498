r"""Activations in more digits: values and slopes of arrays of `Digits`, with their errors.

ReLU is exact. tanh and softplus, and their slopes 1 - tanh^2 and 1/(1 + e^-v), are enclosed by Arb
(package python-flint); the error is at most 2^-118 per entry.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from wellposed.errors import MissingPackage, how_to_install
from wellposed.prove.verify_digits import PLACES, Digits, Floats

#: Bounds of |s''| for each activation.
CURVATURE = {"relu": 0.0, "tanh": 0.7699, "softplus": 0.25}
#: Bounds of |s'''|.
THIRD = {"relu": 0.0, "tanh": 2.0, "softplus": 0.0963}
#: Largest error of a value or slope that Arb gives.
ENCLOSED = 2.0 ** (2 - PLACES)


def evaluate(name: str, shift: float, V: Digits) -> tuple[Digits, Digits]:
    """s(V) and s'(V), entry by entry."""
    if name == "relu":
        active = V.signs() > 0
        return V.where(active), Digits.of(active.astype(np.float64))
    flint = _flint()
    before, flint.ctx.prec = flint.ctx.prec, PLACES + 48
    try:
        values, slopes = [], []
        one, moved = flint.arb(1), flint.arb(shift)
        for integer in V.integers().ravel():
            v = flint.arb((int(integer), -PLACES))
            if name == "tanh":
                value = v.tanh()
                slope = v.cosh() ** -2
            else:
                value = v.exp().log1p() - moved if v <= 0 else v + (-v).exp().log1p() - moved
                slope = one / (one + (-v).exp())
            values.append(_rounded(value))
            slopes.append(_rounded(slope))
    finally:
        flint.ctx.prec = before
    return _digits(values, V.shape), _digits(slopes, V.shape)


def values_in_floats(name: str, shift: float, V: Floats) -> Floats:
    """s(V) in float64: for guesses."""
    if name == "relu":
        return np.maximum(V, 0.0)
    return np.tanh(V) if name == "tanh" else np.logaddexp(V, 0.0) - shift


def curvature(name: str, V: Floats) -> Floats:
    """|s''(V)| in float64, to about 15 digits."""
    if name == "relu":
        return np.zeros_like(V)
    if name == "tanh":
        return np.asarray(2 * np.abs(np.tanh(V)) / np.cosh(np.minimum(np.abs(V), 300.0)) ** 2)
    return np.asarray(1 / (2 + 2 * np.cosh(np.minimum(np.abs(V), 300.0))))


def signed_curvature(name: str, V: Floats) -> Floats:
    """s''(V): falls with tanh, and rises with softplus on both sides."""
    return np.asarray(curvature(name, V) * (-np.sign(V) if name == "tanh" else 1.0))


def curvature_ratio(name: str, V: Floats) -> Floats:
    """|s''(V)|/s'(V) in float64, for a smooth activation."""
    return 2 * np.abs(np.tanh(V)) if name == "tanh" else np.asarray(np.exp(-np.logaddexp(V, 0.0)))


def _rounded(value: Any) -> int:
    """The middle of an enclosure, times 2^120, rounded; the enclosure must be narrow."""
    scaled = value * (1 << PLACES)
    if not (scaled.is_finite() and scaled.rad() < 1):
        raise ArithmeticError("Arb has not enough digits")
    middle, exponent = scaled.mid().man_exp()
    return int(middle) << int(exponent) if exponent >= 0 else int(middle) >> int(-exponent)


def _digits(values: list[int], shape: tuple[int, ...]) -> Digits:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return Digits.from_integers(array.reshape(shape))


def _flint() -> Any:
    try:
        import flint
    except ImportError:
        raise MissingPackage(
            f"To check a proof about a smooth network, python-flint is needed; install it with: {how_to_install('verify')}."
        ) from None
    return flint
