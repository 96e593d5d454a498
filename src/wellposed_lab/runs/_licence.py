"""What a certificate licenses, for its reader: which parameters move, how fast the residual falls, and what of plain flow."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from wellposed.certify import Certificate

__all__ = ["NEGLIGIBLE", "each", "halving", "hidden_ratio", "licence", "moves", "plain_flow"]

#: Hidden steps below this part of the read-out's count as none: what is proved is then training of the read-out.
NEGLIGIBLE = 1e-3


def each(certificate: Certificate) -> Iterator[Certificate]:
    """A certificate, and those by other theorems that were tried with it."""
    yield certificate
    for other in certificate.others:
        yield from each(other)


def hidden_ratio(certificate: Certificate) -> float:
    """The smallest licensed step, or speed of a flow, over the largest: hidden parameters over read-out; 1 if all are equal."""
    speeds = certificate.rates if certificate.dynamics == "flow" else certificate.step_size
    known = [value for value in speeds.values() if 0 < value < math.inf] if isinstance(speeds, Mapping) else []
    return min(known) / max(known) if known else 1.0


def moves(certificate: Certificate) -> str:
    """Which parameters move along what is licensed: all, or the read-out and hardly anything else."""
    ratio, what = hidden_ratio(certificate), "speeds" if certificate.dynamics == "flow" else "steps"
    if ratio == 1:
        return f"all parameters with equal {what}"
    if ratio < NEGLIGIBLE:
        return f"read-out only (hidden {what} are {ratio:.2g} of its)"
    return f"all parameters, hidden {what} {ratio:.2g} of the read-out's"


def halving(certificate: Certificate) -> str:
    """How long the residual takes to halve, at most: steps of descent, or time of a flow."""
    rate, flows = certificate.rate, certificate.dynamics == "flow"
    if rate is None or not (0 < rate < math.inf if flows else 0 <= rate < 1):
        return "no rate is proved"
    if flows:
        return f"|r| halves within time {math.log(2) / rate:.3g}"
    if rate <= 0.5:
        return "|r| halves within 1 step"
    steps = math.log(2) / -math.log(rate)
    # three digits, upwards: what is shown is still a bound
    unit = 10 ** max(0, math.floor(math.log10(steps)) - 2)
    return f"|r| halves within {math.ceil(steps / unit) * unit:,} steps"


def plain_flow(certificate: Certificate) -> str:
    """The verdict of the radius certificate about plain gradient flow, which has one speed for all parameters."""
    flows = (one for one in each(certificate) if (one.theorem, one.dynamics) == ("radius", "flow"))
    found = [str(one.verdict) for one in flows if hidden_ratio(one) == 1]
    return f"plain gradient flow: {found[0] if found else 'not tried'}"


def licence(certificate: Certificate) -> str:
    """In one line: what moves, how fast the residual falls, and the verdict about plain flow beside it; "" if no rate is."""
    if not certificate.certified or certificate.rate is None:
        return ""
    if certificate.dynamics == "flow" and hidden_ratio(certificate) == 1:
        return f"plain gradient flow, {halving(certificate)}"
    return f"{moves(certificate)}; {halving(certificate)}; {plain_flow(certificate)}"
