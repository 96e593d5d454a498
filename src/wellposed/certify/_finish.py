"""The one way to a certificate that licenses something."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from wellposed.certify._certificate import Certificate, Hypothesis, Verdict
from wellposed.certify._range import OUT_OF_RANGE, license_fault

__all__ = ["finish", "in_range"]


def finish(
    theorem: str,
    verdict: Verdict,
    hypotheses: tuple[Hypothesis, ...],
    dynamics: str,
    *,
    step_size: float | Mapping[str, float] | None = None,
    rates: Mapping[str, float] | None = None,
    rate: float | None = None,
    radii: Mapping[str, float] | None = None,
    licenses: tuple[str, ...] = (),
    **rest: Any,
) -> Certificate:
    """The certificate; where it would license numbers that float64 does not hold, UNDECIDED, and it says which.

    Args:
        theorem, verdict, hypotheses, dynamics, step_size, rates, rate, radii, licenses: As in `Certificate`.
        rest: `measured`, `errors` and `note`.
    """
    if verdict is Verdict.CERTIFIED and (fault := license_fault(dynamics, step_size, rates, rate, radii)):
        note = f"{OUT_OF_RANGE}: all hypotheses hold, but {fault}."
        return Certificate(theorem, Verdict.UNDECIDED, hypotheses, dynamics, **(rest | {"note": note}))
    licensed: dict[str, Any] = {"step_size": step_size, "rates": rates, "rate": rate, "radii": radii, "licenses": licenses}
    return Certificate(theorem, verdict, hypotheses, dynamics, **licensed, **rest)


def in_range(theorem: str, dynamics: str, make: Callable[[], Certificate]) -> Certificate:
    """What `make` returns, or UNDECIDED where its scalars overflow: Python's `**` and `/` raise where IEEE has infinities."""
    try:
        return make()
    except ArithmeticError:
        note = f"{OUT_OF_RANGE} in the conditions of the theorem. Rescale the inputs, the labels or the parameters."
        return Certificate(theorem, Verdict.UNDECIDED, dynamics=dynamics, note=note)
