"""The hypotheses of the radius certificate, as numbers."""

from __future__ import annotations

import math
from dataclasses import replace

from wellposed.certify._certificate import Hypothesis
from wellposed.certify._units import Unit
from wellposed.nn import JacobianBounds

__all__ = ["ball", "full_rank", "no_radius", "outweighs", "steady"]


def full_rank(s: float, unit: Unit) -> Hypothesis:
    """Of all theorems: s > 0."""
    name = "s: sqrt(lambda_min) of the kernel in the ball"
    return _in_units(Hypothesis.compare(name, "docs/certificates.md", s, ">", 0.0, refutes=False), unit, 1)


def ball(s: float, e: float, R: float | None) -> Hypothesis:
    """The ball is not left: R >= e/s(R)."""
    if R is None:
        return no_radius("radius R >= e/s(R)", e / s if s > 0 else math.inf)
    return Hypothesis.compare("radius R >= e/s(R)", "docs/certificates.md", R, ">=", e / s)


def no_radius(name: str, needed: float, note: str = "") -> Hypothesis:
    """The condition that failed for every radius, with what it asks for at the present point."""
    text = "no radius satisfies it; the bound shown is that of the present point" + (f", {note}" if note else "")
    return Hypothesis(name, "docs/certificates.md", None, needed, ">=", None, text)


def outweighs(h: float, E: float, s: float, unit: Unit, *, here: bool = False) -> Hypothesis:
    """Of Theorem 2; `here` if the numbers are those of the present point instead of a ball's."""
    name, note = "the read-out outweighs the hidden steps: 2 h E < s^2", "at the present point" if here else ""
    hypothesis = Hypothesis.compare(name, "docs/certificates.md", 2 * h * E, "<", s**2, refutes=not here, note=note)
    return _in_units(hypothesis, unit, 2)


def steady(bounds: JacobianBounds, share: float, unit: Unit, *, here: bool = False) -> Hypothesis:
    """Of Theorem 3; `here` as in `outweighs`."""
    name, right = "the Jacobian is steady: |S - J| < (1 - share/2) s", (1 - share / 2) * bounds.least
    note = f"steps of {share:g}/|J|^2" + (", at the present point" if here else "")
    hypothesis = Hypothesis.compare(name, "docs/certificates.md", bounds.variation, "<", right, refutes=not here, note=note)
    return _in_units(hypothesis, unit, 1)


def _in_units(hypothesis: Hypothesis, unit: Unit, power: int) -> Hypothesis:
    """A comparison that was made in the unit, with the sides of the data as they were given."""
    assert hypothesis.value is not None and hypothesis.bound is not None
    value, bound, where = unit.sides(hypothesis.value, hypothesis.bound, power)
    return replace(hypothesis, value=value, bound=bound, note=", ".join(filter(None, (hypothesis.note, where))))
