"""Certificates that were read from a file: checked field by field, and for whether they agree with
themselves."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from wellposed.certify.certificate import RELATIONS, Certificate, Hypothesis, Verdict
from wellposed.errors import InvalidArgument

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
#: Theorems that only report.
NEVER_CERTIFY = ("gao2022", "gao2023")
#: What a verdict may license.
_LICENSED = ("step_size", "rates", "rate", "radii", "licenses")
#: Of a comparison `<=` or `>=`, whose sides may be rounded by a few units each.
_ROUNDING = 2.0**-48


def as_recorded(plain: Mapping[str, Any]) -> tuple[Certificate, list[str]]:
    """The certificate that a file holds, as far as it agrees with itself, and what is to be said
    about it.

    One that contradicts itself is UNDECIDED, licenses nothing, and its note says why; so is one by
    another theorem in it.

    Args:
        plain: As `Certificate.to_dict` wrote it.

    Returns:
        The certificate, and for each that contradicts itself what follows the name of the file in a
        sentence.

    Raises:
        InvalidArgument: It is not a certificate.
    """
    check_plain(plain, {item.name for item in dataclasses.fields(Certificate)})
    return _agreeing(plain)


def _agreeing(plain: Mapping[str, Any]) -> tuple[Certificate, list[str]]:
    claimed, inner = Verdict(plain["verdict"]), [_agreeing(other) for other in plain["others"]]
    others = tuple(certificate for certificate, _ in inner)
    # read as UNDECIDED: a certificate that is CERTIFIED cannot even be made of some numbers
    certificate = Certificate.from_dict({**plain, "verdict": Verdict.UNDECIDED.value, "others": []})
    wrong = contradictions(certificate, claimed)
    said = [sentence for _, sentences in inner for sentence in sentences]
    if not wrong:
        return dataclasses.replace(certificate, verdict=claimed, others=others), said
    note = (
        f"The file says {claimed}, and its own numbers contradict it ({'; '.join(wrong[:3])}); it was changed or forged. "
        f"{certificate.note}"
    )
    hypotheses = tuple(dataclasses.replace(h, holds=None) if _is_false(h) else h for h in certificate.hypotheses)
    empty = Certificate(
        certificate.theorem,
        Verdict.UNDECIDED,
        hypotheses,
        certificate.dynamics,
        measured=certificate.measured,
        errors=certificate.errors,
        note=note.strip(),
        others=others,
    )
    shown = "what it licenses is not shown" if claimed is Verdict.UNDECIDED else f"it is not shown as {claimed}"
    return empty, [f"contradicts itself ({certificate.theorem}: {wrong[0]}), so {shown}", *said]


def contradictions(certificate: Certificate, claimed: Verdict) -> list[str]:
    """Where a certificate contradicts the verdict that its file claims, in words; those in it are
    not looked at.

    Each hypothesis that is said to hold is compared again, strict ones without tolerance, and no
    error is negative. Only CERTIFIED licenses something. It needs hypotheses, all of them holding,
    and licenses only finite positive steps and speeds, finite radii, and a rate on the right side:
    0 <= q < 1 for descent, with a step size, s > 0 for flow. Theorems that only report never have
    it. That the numbers are true of a network is not checked: only `certify` on the network shows
    that.
    """
    found = [f"{h.name}: {h.value!r} {h.relation} {h.bound!r} is false" for h in certificate.hypotheses if _is_false(h)]
    found += [f"the error {name} is negative, {value!r}" for name, value in certificate.errors.items() if value < 0]
    if claimed is not Verdict.CERTIFIED:
        given = [name for name in _LICENSED if getattr(certificate, name) not in (None, ())]
        return found + [f"it is {claimed} and licenses something ({name.replace('_', ' ')})" for name in given]
    if certificate.theorem in NEVER_CERTIFY:
        found.append(f"{certificate.theorem} certifies nothing: its constants are not stated")
    if not certificate.hypotheses:
        found.append("it has no hypotheses")
    found += [f"{h.name}: it does not hold" for h in certificate.hypotheses if h.holds is not True]
    for name in ("step_size", "rates", "radii"):
        table = getattr(certificate, name)
        values = list(table.values()) or [math.nan] if isinstance(table, Mapping) else [] if table is None else [table]
        if not all(0 <= value < math.inf and (value > 0 or name == "radii") for value in values):
            wanted = "finite and not negative" if name == "radii" else "finite and positive"
            found.append(f"{name.replace('_', ' ')} must be {wanted}")
    if certificate.dynamics not in ("", "flow", "descent"):
        found.append(f"dynamics {certificate.dynamics!r:.40} is neither flow nor descent")
    rate = certificate.rate
    if certificate.dynamics == "" and rate is not None:
        found.append("it has a rate without dynamics")
    if certificate.dynamics == "flow" and not (rate is not None and 0 < rate < math.inf):
        found.append(f"the rate of a flow must be positive and finite; it is {rate!r}")
    if certificate.dynamics == "descent" and not (rate is not None and 0 <= rate < 1):
        found.append(f"the rate of a descent must be in [0, 1); it is {rate!r}")
    if certificate.dynamics == "descent" and certificate.step_size is None:
        found.append("it certifies a descent with no step size")
    return found


def _is_false(hypothesis: Hypothesis) -> bool:
    """Whether it is said to hold and its two sides say that it does not."""
    if hypothesis.holds is not True:
        return False
    value, bound = hypothesis.value, hypothesis.bound
    if value is None or bound is None or math.isnan(value) or math.isnan(bound):
        return True
    gap = hypothesis.margin or 0.0
    if math.isinf(value) or math.isinf(bound):
        return not gap > 0
    if hypothesis.relation in ("<", ">"):
        return not gap > 0
    return gap < -_ROUNDING * max(abs(value), abs(bound))


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
        raise InvalidArgument(f"This is not a certificate: fields {sorted(map(str, wrong))[:5]} are missing or unknown.")
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
