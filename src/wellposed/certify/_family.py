"""Which network a theorem is about, and what the radius certificate asks of each."""

from __future__ import annotations

import math
from typing import Any

from wellposed.certify._measure import Measurement
from wellposed.certify._sensitivity import SHARPENINGS, Contractive
from wellposed.certify._sensitivity_monotone import MonotoneSensitivity
from wellposed.errors import InvalidType
from wellposed.nn import AbstractSensitivity, GaussianDEQ, ImplicitOnlyDEQ, MonotoneDEQ, SkipDEQ

__all__ = ["check_family", "sensitivity_of"]


def check_family(theorem: str, model: Any, family: type) -> None:
    """Raises if the theorem says nothing about this kind of model."""
    if not isinstance(model, family):
        raise InvalidType(
            f"{theorem} is a theorem about {family.__name__}; got {type(model).__name__}. The theorem 'radius' knows all "
            "networks."
        )


def sensitivity_of(at: Measurement, sharpen: tuple[str, ...] = SHARPENINGS) -> AbstractSensitivity:
    """The bounds of the family that a measured network belongs to."""
    model = at.model
    own: Any = getattr(model, "sensitivity", None)
    if callable(own):
        sensitivity = own(at)
        if not isinstance(sensitivity, AbstractSensitivity):
            raise InvalidType(f"{type(model).__name__}.sensitivity must return an AbstractSensitivity; got {sensitivity!r}.")
        return sensitivity
    if isinstance(model, GaussianDEQ):
        return Contractive(at, recurrent="W", injected="U", readout=("a",), sharpen=sharpen)
    if isinstance(model, SkipDEQ):
        root = math.sqrt(model.width)
        return Contractive(
            at,
            recurrent="A",
            injected="W",
            readout=("u", "v"),
            recurrent_scale=model.gamma / root,
            injection_scale=1 / root,
            skip=True,
            sharpen=sharpen,
        )
    if isinstance(model, ImplicitOnlyDEQ):
        return Contractive(at, recurrent="A", injected=None, readout=(), recurrent_scale=model.gamma, sharpen=sharpen)
    if isinstance(model, MonotoneDEQ):
        return MonotoneSensitivity(at)
    raise InvalidType(
        f"The radius certificate does not know {type(model).__name__}: give it a method sensitivity(measurement)."
    )
