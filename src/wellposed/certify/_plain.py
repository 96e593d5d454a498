"""Certificates as files hold them: checked field by field before anything is made of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wellposed.errors import InvalidArgument

__all__ = ["RELATIONS", "check_plain"]

RELATIONS = ("<", "<=", ">", ">=")
VERDICTS = ("certified", "violated", "undecided")
#: Numbers that JSON does not have.
NOT_FINITE = ("inf", "-inf", "nan")
#: How deep certificates by other theorems may lie in each other; ours do not.
DEPTH = 8

_HYPOTHESIS = {"name", "equation", "value", "bound", "relation", "holds", "note"}
_KINDS = {
    "theorem": str,
    "verdict": str,
    "hypotheses": list,
    "dynamics": str,
    "step_size": object,
    "rates": object,
    "rate": object,
    "radii": object,
    "licenses": list,
    "measured": Mapping,
    "errors": Mapping,
    "note": str,
    "others": list,
}


def check_plain(plain: Any, known: set[str], depth: int = 0) -> None:
    """Raises `InvalidArgument` unless this is what `Certificate.to_dict` makes.

    Args:
        plain: As JSON gives it.
        known: The names of the fields.
        depth: In how many other certificates it lies.
    """
    if not isinstance(plain, Mapping):
        raise InvalidArgument(f"This is not a certificate: expected an object with its fields; got {type(plain).__name__}.")
    if wrong := known ^ set(plain):
        raise InvalidArgument(f"This is no certificate: fields {sorted(map(str, wrong))[:5]} are missing or unknown.")
    for name, kind in _KINDS.items():
        if not isinstance(plain[name], kind) and not (kind is list and isinstance(plain[name], tuple)):
            _refuse(name, plain[name])
    if plain["verdict"] not in VERDICTS:
        _refuse("verdict", plain["verdict"])
    for name in ("step_size", "rates", "radii", "measured", "errors"):
        if not _is_table(plain[name]) and not (name == "step_size" and _is_number(plain[name])):
            _refuse(name, plain[name])
    if not _is_number(plain["rate"]):
        _refuse("rate", plain["rate"])
    if not all(isinstance(sentence, str) for sentence in plain["licenses"]):
        _refuse("licenses", plain["licenses"])
    for hypothesis in plain["hypotheses"]:
        _check_hypothesis(hypothesis)
    if plain["others"] and depth == DEPTH:
        raise InvalidArgument(f"This is not a certificate: more than {DEPTH} lie in each other.")
    for other in plain["others"]:
        check_plain(other, known, depth + 1)


def _check_hypothesis(plain: Any) -> None:
    if not isinstance(plain, Mapping) or set(plain) - {"margin"} != _HYPOTHESIS:
        _refuse("hypotheses", plain)
    if not all(isinstance(plain[name], str) for name in ("name", "equation", "note")):
        _refuse("hypotheses", plain)
    if plain["relation"] not in RELATIONS or not (plain["holds"] is None or isinstance(plain["holds"], bool)):
        _refuse("hypotheses", plain)
    if not (_is_number(plain["value"]) and _is_number(plain["bound"])):
        _refuse("hypotheses", plain)


def _is_table(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return value is None
    return all(isinstance(name, str) and number is not None and _is_number(number) for name, number in value.items())


def _is_number(value: Any) -> bool:
    """A number that a float can hold, text for one that JSON does not have, or None."""
    if isinstance(value, bool):
        return False
    if isinstance(value, int):
        return value.bit_length() < 1024
    return value is None or isinstance(value, float) or (isinstance(value, str) and value in NOT_FINITE)


def _refuse(name: str, value: Any) -> None:
    seen = f"{value!r:.100}" if isinstance(value, (str, float, bool, type(None))) else f"of type {type(value).__name__}"
    raise InvalidArgument(f"This is not a certificate: '{name}' is {seen}, which certificates do not have there.")
