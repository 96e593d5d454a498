"""A user's own theorem: a callable from a model and data to a certificate."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from wellposed.certify._certificate import Certificate, Verdict
from wellposed.certify._recheck import contradictions
from wellposed.errors import InvalidArgument, InvalidType

__all__ = ["OwnTheorem", "certificate_by", "check_theorem"]

#: (model, X, y, **options) -> Certificate.
OwnTheorem = Callable[..., Certificate]


def check_theorem(theorem: object) -> None:
    """Raises unless this is a name or can be called."""
    if not isinstance(theorem, str) and not callable(theorem):
        raise InvalidType(
            f"theorem must be a name or a callable (model, X, y) -> Certificate; got {type(theorem).__name__} {theorem!r:.60}."
        )


def certificate_by(theorem: OwnTheorem, model: Any, X: Tensor, y: Tensor, options: Mapping[str, Any]) -> Certificate:
    """What the callable returns, checked to be a certificate that agrees with itself.

    Args:
        theorem: (model, X, y, **options) -> Certificate.
        model: Any; the theorem decides about which kinds it says something.
        X, y: As the caller has them.
        options: Keyword arguments of the theorem.
    """
    name = getattr(theorem, "__name__", type(theorem).__name__)
    _check_signature(name, theorem, options)
    found = theorem(model, X, y, **options)
    if not isinstance(found, Certificate):
        raise InvalidType(f"theorem={name} must return a wellposed.certify.Certificate; it returned {type(found).__name__}.")
    if not isinstance(found.verdict, Verdict):
        raise InvalidType(f"theorem={name} must give its certificate a wellposed.Verdict; got verdict={found.verdict!r:.60}.")
    if found.certified and (open_ones := [h.name for h in found.hypotheses if h.holds is not True]):
        raise InvalidArgument(
            f"theorem={name} returned CERTIFIED although its hypothesis {open_ones[0]!r} does not hold. Return VIOLATED or "
            "UNDECIDED there."
        )
    if wrong := contradictions(found, found.verdict):
        raise InvalidArgument(f"theorem={name} returned a certificate that contradicts itself: {wrong[0]}.")
    return found


def _check_signature(name: str, theorem: OwnTheorem, options: Mapping[str, Any]) -> None:
    try:
        signature = inspect.signature(theorem)
    except ValueError:  # built-in functions have none
        return
    try:
        signature.bind(None, None, None, **options)
    except TypeError as error:
        given = "".join(f", {option}=..." for option in options)
        raise InvalidArgument(
            f"theorem={name} is called as {name}(model, X, y{given}), but it is {name}{signature}."
        ) from error
