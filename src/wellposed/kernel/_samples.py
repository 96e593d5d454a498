"""What every kernel at infinite width checks of its arguments, once, at the border."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wellposed.errors import InvalidArgument, InvalidType

__all__ = ["check_fraction", "check_positive", "check_samples", "symmetric"]


def check_samples(X: Tensor, X2: Tensor | None, name: str) -> tuple[Tensor, Tensor]:
    """(n, d) and (n2, d) samples in rows, finite, not empty, of one dtype and device; X2 is X if it was None."""
    _check_rows(X, f"{name}: X")
    if X2 is None:
        return X, X
    _check_rows(X2, f"{name}: X2")
    if X2.shape[1] != X.shape[1]:
        raise InvalidArgument(
            f"{name}: X2 must have as many columns as X: expected (n2, {X.shape[1]}), got {tuple(X2.shape)}. Samples are rows."
        )
    if X2.dtype != X.dtype or X2.device != X.device:
        raise InvalidArgument(
            f"{name}: X2 must have the dtype and device of X ({X.dtype}, {X.device}), got {X2.dtype}, {X2.device}."
            " Use X2.to(X)."
        )
    return X, X2


def symmetric(K: Tensor, X: Tensor, X2: Tensor) -> Tensor:
    """K (..., n, n2) made exactly symmetric if X2 is X: vectorized functions round by an entry's place in memory."""
    return (K + K.mT) / 2 if X2 is X else K


def check_fraction(value: float, name: str, parameter: str) -> float:
    """A number in [0, 1): the variance at which the equilibrium of the limit exists."""
    if not _is_number(value) or not 0.0 <= value < 1.0:
        raise InvalidArgument(
            f"{name}: '{parameter}' must be a number in [0, 1), got {value!r}. At 1 the population equilibrium ceases to exist."
        )
    return float(value)


def check_positive(value: float, name: str, parameter: str, *, or_zero: bool = False) -> float:
    """A finite number above 0 (or from 0)."""
    if not _is_number(value) or not math.isfinite(value) or value < 0.0 or (value == 0.0 and not or_zero):
        expected = "at least 0" if or_zero else "above 0"
        raise InvalidArgument(f"{name}: '{parameter}' must be a finite number {expected}, got {value!r}.")
    return float(value)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_rows(X: Tensor, what: str) -> None:
    if not isinstance(X, Tensor):
        raise InvalidType(f"{what} must be a tensor, got {type(X).__name__}. Use torch.as_tensor(...).")
    if X.ndim != 2 or 0 in X.shape:
        raise InvalidArgument(
            f"{what} must be (n, d) with n, d >= 1, got {tuple(X.shape)}. Samples are rows; use X[None] for one."
        )
    if X.dtype not in (torch.float32, torch.float64):
        raise InvalidArgument(f"{what} must be float32 or float64, got {X.dtype}. Use X.double().")
    finite = torch.isfinite(X).all(dim=1)
    if not finite.all():
        row = int((~finite).nonzero()[0])
        raise InvalidArgument(f"{what} has {int((~finite).sum())} rows with NaN or infinity (first: row {row}). Remove them.")
