"""What can be checked of a certificate that was read from a file: whether it agrees with itself."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from wellposed.certify._certificate import Certificate, Hypothesis, Verdict
from wellposed.certify._plain import check_plain

__all__ = ["as_recorded", "contradictions"]

#: Theorems that only report.
NEVER_CERTIFY = ("gao2022", "gao2023")
#: What a verdict may license.
_LICENSED = ("step_size", "rates", "rate", "radii", "licenses")
#: Of a comparison `<=` or `>=`, whose sides may be rounded by a few units each.
_ROUNDING = 2.0**-48


def as_recorded(plain: Mapping[str, Any]) -> tuple[Certificate, list[str]]:
    """The certificate that a file holds, as far as it agrees with itself, and what is to be said about it.

    One that contradicts itself is UNDECIDED, licenses nothing, and its note says why; so is one by another theorem in it.

    Args:
        plain: As `Certificate.to_dict` wrote it.

    Returns:
        The certificate, and for each that contradicts itself what follows the name of the file in a sentence.

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
    """Where a certificate contradicts the verdict that its file claims, in words; those in it are not looked at.

    Each hypothesis that is said to hold is compared again, strict ones without tolerance, and no error is negative. Only
    CERTIFIED licenses something. It needs hypotheses, all of them holding, and licenses only finite positive steps and speeds,
    finite radii, and a rate on the right side: 0 <= q < 1 for descent, with a step size, s > 0 for flow. Theorems that only
    report never have it. That the numbers are true of a network is not checked: only `certify` on the network shows that.
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
