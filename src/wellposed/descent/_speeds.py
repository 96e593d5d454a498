"""How fast each parameter moves: one number for all, or one by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, SupportsFloat

from torch import nn

from wellposed.descent._objective import trained_parameters
from wellposed.errors import InvalidArgument, InvalidType, did_you_mean

__all__ = ["speeds"]


def speeds(name: str, given: Any, model: nn.Module, *, default: float) -> dict[str, float]:
    """The speed of every trained parameter, in their order; at least one is positive.

    Args:
        name: Of the argument, for messages.
        given: A number at least 0, or a mapping from names to such numbers.
        model: The model.
        default: For parameters that the mapping does not name.
    """
    known = trained_parameters(model)
    if isinstance(given, Mapping):
        found = _by_name(name, given, model, known, default)
    else:
        found = dict.fromkeys(known, _checked(name, given))
    if not any(found.values()):
        raise InvalidArgument(
            f"{name}={given!r} holds every parameter fixed, so nothing would move; give at least one of {', '.join(known)} a "
            "positive number."
        )
    return found


def _by_name(
    name: str, given: Mapping[str, Any], model: nn.Module, known: Mapping[str, nn.Parameter], default: float
) -> dict[str, float]:
    for key in given:
        if key not in known:
            frozen = key in dict(model.named_parameters())
            reason = "is held fixed (requires_grad=False) in" if frozen else "is no parameter of"
            hint = "" if frozen else did_you_mean(str(key), known)
            raise InvalidArgument(
                f"{name} names {key!r}, which {reason} {type(model).__name__}; trained are {', '.join(known)}.{hint}"
            )
    return {key: _checked(f"{name}[{key!r}]", given[key]) if key in given else default for key in known}


def _checked(name: str, value: Any) -> float:
    if isinstance(value, str) or not isinstance(value, SupportsFloat):
        raise InvalidType(f"{name} must be a number at least 0, or a number for each parameter by name; got {value!r}.")
    number = float(value)
    if not 0.0 <= number < math.inf:
        raise InvalidArgument(f"{name} must be a finite number at least 0; got {value!r}.")
    return number
