"""The sizes of an experiment."""

from __future__ import annotations

import ast
import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from wellposed.errors import InvalidArgument, did_you_mean

__all__ = ["Config", "changes_of"]

Self = TypeVar("Self", bound="Config")


@dataclass(frozen=True, kw_only=True)
class Config:
    """What every experiment has; each adds its own. Values are numbers, words, or tuples of one kind of them.

    Attributes:
        seeds: Each is a draw of everything that is random: data, start, labels.
    """

    seeds: tuple[int, ...] = (0, 1, 2)

    def to_dict(self) -> dict[str, Any]:
        """Plain Python that JSON can write."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in dataclasses.asdict(self).items()}

    def changed(self: Self, changes: Mapping[str, Any]) -> Self:
        """The same with other values; unknown keys and values of another kind are refused.

        Args:
            changes: By name. One value in the place of a tuple stands for a tuple of one.
        """
        known = [field.name for field in dataclasses.fields(self)]
        for key in changes:
            if key not in known:
                raise InvalidArgument(
                    f"Unknown key {key!r} of the experiment; known are {', '.join(known)}.{did_you_mean(key, known)}"
                )
        return dataclasses.replace(self, **{key: _like(key, getattr(self, key), value) for key, value in changes.items()})


def changes_of(assignments: Iterable[str]) -> dict[str, Any]:
    """`["widths=50,100", "data=digits"]` as a dictionary."""
    changes = {}
    for text in assignments:
        key, separator, value = text.partition("=")
        if not separator or not key.strip():
            raise InvalidArgument(f"Changes are written key=value, such as widths=50,100; got {text!r}.")
        try:
            changes[key.strip()] = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError):
            words = tuple(word.strip() for word in value.split(","))
            changes[key.strip()] = words[0] if len(words) == 1 else words
    return changes


def _like(key: str, default: Any, value: Any) -> Any:
    """The value, if it is of the kind of the default."""
    if isinstance(default, tuple):
        parts = tuple(value) if isinstance(value, (tuple, list)) else (value,)
        if not parts:
            raise InvalidArgument(f"{key} must not be empty.")
        if len(set(parts)) != len(parts):
            raise InvalidArgument(f"{key} must not have a value twice; got {parts!r}.")
        return tuple(_like(key, default[0], part) for part in parts)
    kind = type(default)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise InvalidArgument(f"{key} must be of type {kind.__name__}, such as {default!r}; got {value!r}.")
    if kind in (int, float) and not (0 < value < math.inf or key == "seeds" and value == 0):
        raise InvalidArgument(f"{key} must be positive and finite; got {value!r}.")
    return value
