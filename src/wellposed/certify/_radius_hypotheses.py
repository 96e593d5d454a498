"""The conditions of the radius certificate as they are reported, with both of their sides."""

from __future__ import annotations

import math
from dataclasses import replace

from wellposed.certify.certificate import Hypothesis
from wellposed.linalg.directed import DataUnit
from wellposed.nn.sensitivity import JacobianBounds


def full_rank(s: float, unit: DataUnit) -> Hypothesis:
    """Of all theorems: s > 0."""
    name = "s: sqrt(lambda_min) of the kernel in the ball"
    return _in_units(Hypothesis.compare(name, "docs/certificates.md", s, ">", 0.0, refutes=False), unit, 1)


def ball(mean: float, e: float, R: float | None) -> Hypothesis:
    """The ball is not left: R >= e/(mean of s over [0, R])."""
    name = "radius R >= e/(mean of s on the way)"
    if R is None:
        return no_radius(name, e / mean if mean > 0 else math.inf)
    return Hypothesis.compare(name, "docs/certificates.md", R, ">=", e / mean)


def no_radius(name: str, needed: float, note: str = "") -> Hypothesis:
    """The condition that failed for every radius, with what it asks for at the present point."""
    text = "no radius satisfies it; the bound shown is that of the present point" + (f", {note}" if note else "")
    return Hypothesis(name, "docs/certificates.md", None, needed, ">=", None, text)


def outweighs(h: float, E: float, s: float, unit: DataUnit, *, here: bool = False) -> Hypothesis:
    """Of Theorem 2; `here` if the numbers are those of the present point instead of a ball's."""
    name, note = "the read-out outweighs the hidden steps: 2 h E < s^2", "at the present point" if here else ""
    hypothesis = Hypothesis.compare(name, "docs/certificates.md", 2 * h * E, "<", s**2, refutes=not here, note=note)
    return _in_units(hypothesis, unit, 2)


def steady(bounds: JacobianBounds, share: float, unit: DataUnit, *, here: bool = False) -> Hypothesis:
    """Of Theorem 3; `here` as in `outweighs`."""
    name, right = "the Jacobian is steady: |S - J| < (1 - share/2) s", (1 - share / 2) * bounds.least
    note = f"steps of {share:g}/|J|^2" + (", at the present point" if here else "")
    hypothesis = Hypothesis.compare(name, "docs/certificates.md", bounds.variation, "<", right, refutes=not here, note=note)
    return _in_units(hypothesis, unit, 1)


def _in_units(hypothesis: Hypothesis, unit: DataUnit, power: int) -> Hypothesis:
    """A comparison that was made in the unit, with the sides of the data as they were given."""
    assert hypothesis.value is not None and hypothesis.bound is not None
    value, bound, where = unit.sides(hypothesis.value, hypothesis.bound, power)
    return replace(hypothesis, value=value, bound=bound, note=", ".join(filter(None, (hypothesis.note, where))))
