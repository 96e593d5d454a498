"""Checks of arguments: one sentence with the value seen and what was expected."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from wellposed._tree import describe, leaves
from wellposed.errors import InvalidArgument, InvalidType, did_you_mean

#: What to do about a failure.
Policy = Literal["raise", "warn", "ignore"]
LONGEST = 120  #: Characters of a wrong value in an error message.


def shown(value: Any) -> str:
    """A wrong value in an error message: a tensor or array by its shape, all else in one line."""
    if isinstance(value, (Tensor, np.ndarray)) and value.ndim:
        return f"{type(value).__name__} of shape {tuple(value.shape)}"
    if any(isinstance(leaf, Tensor) for leaf in leaves(value)):
        return describe(value)
    text = " ".join(repr(value).split())
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 4]} ..."


def check_policy(value: object) -> None:
    """`value` must be a `Policy`."""
    policies = ("raise", "warn", "ignore")
    if value not in policies:
        hint = did_you_mean(str(value), policies)
        raise InvalidArgument(f"on_failure must be 'raise', 'warn' or 'ignore'; got {shown(value)}.{hint}")


def check_positive_integer(owner: str, name: str, value: object) -> None:
    """An integer option of `owner` must be at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidArgument(
            f"The {name!r} parameter of {owner} must be an integer of at least 1. Got {shown(value)} instead."
        )


def check_path(what: str, value: Any) -> Path:
    """`value` as a path; `what` names it in the sentence that refuses another object."""
    if not isinstance(value, (str, os.PathLike)):
        raise InvalidType(f"{what} must be a path; got {type(value).__name__}.")
    return Path(value)


def check_interval(owner: str, name: str, value: object, *, low: float, high: float = math.inf, closed: str = "right") -> None:
    """A real option of `owner` must lie in an interval, `closed` on which sides."""
    left, right = closed in ("left", "both"), closed in ("right", "both") and high < math.inf
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    ok = ok and low <= value <= high and (left or value != low) and (right or value != high)  # type: ignore[operator]  # a number, by `ok`
    if not ok:
        bounds = f"{'[' if left else '('}{low:g}, {high:g}{']' if right else ')'}"
        raise InvalidArgument(f"The {name!r} parameter of {owner} must be a float in {bounds}. Got {shown(value)} instead.")


def check_tolerances(*, rtol: object, atol: object, max_steps: object) -> None:
    """Tolerances must be finite and not negative, the budget an integer of at least 1."""
    for name, value in (("rtol", rtol), ("atol", atol)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise InvalidArgument(f"{name} must be a finite float of at least 0; got {shown(value)}.")
    if isinstance(max_steps, bool) or not isinstance(max_steps, int) or max_steps < 1:
        raise InvalidArgument(f"max_steps must be an integer of at least 1; got {shown(max_steps)}.")


def check_state_shape(shape: object, cell: object, *, own: bool) -> None:
    """`state_shape` of a layer must be a tuple of sizes, and is not for a cell with its `own`."""
    if shape is None:
        return
    if own:
        raise InvalidArgument(f"{type(cell).__name__} sets the shape of its state; state_shape={shown(shape)} has no effect.")
    if not isinstance(shape, tuple) or not all(type(size) is int and size >= 0 for size in shape):
        several = " For a state of several tensors give their start to each call: layer(x, (a, b))."
        hint = several if isinstance(shape, (tuple, list, dict)) and not all(isinstance(size, int) for size in shape) else ""
        raise InvalidArgument(
            f"state_shape must be a tuple of integers such as (width,), without the batch; got {shown(shape)}.{hint}"
        )


def check_rows(owner: str, X: object, features: int, dtype: torch.dtype) -> None:
    """Raises unless X is (n, features) of this dtype."""
    if not isinstance(X, Tensor):
        raise InvalidType(f"{owner} expects a tensor X of shape (n, {features}); got {type(X).__name__}.")
    if X.dim() != 2 or X.shape[1] != features:
        raise InvalidArgument(f"{owner} expects X of shape (n, {features}); got {tuple(X.shape)}.")
    if X.dtype != dtype:
        raise InvalidType(f"{owner} has {dtype} parameters and got X of {X.dtype}; convert one, e.g. X.to({dtype}).")
