"""Which network a theorem is about."""

from __future__ import annotations

from typing import Any

from wellposed.errors import InvalidType

__all__ = ["check_family"]


def check_family(theorem: str, model: Any, family: type) -> None:
    """Raises if the theorem says nothing about this kind of model."""
    if not isinstance(model, family):
        raise InvalidType(
            f"{theorem} is a theorem about {family.__name__}; got {type(model).__name__}. The theorem 'radius' knows all "
            "networks."
        )
