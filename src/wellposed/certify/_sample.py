"""What is proved of each sample, and the certificate of all of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context

import torch
from torch import Tensor

from wellposed.certify._followed import Followed
from wellposed.certify.certificate import Certificate, Hypothesis, Verdict
from wellposed.certify.local_certificate import LocalCertificate

#: Where the solve, and not `coupled=True`, made one sample of a batch.
_OF_THIS_BATCH = (
    "Rows depend on each other: f of a row alone is not f of it in this batch. So this is about the batch of {} rows, and says "
    "nothing about a row alone, or in another batch. If that is meant, give coupled=True to the layer."
)
#: What no evaluation shows; mistakes in it are searched for, see `_repeated` and `_outside`.
ASSUMED = "Assumed: the cell is a function of z and x."


_THREE_DIGITS = Context(prec=3, rounding=ROUND_CEILING)


@dataclass(frozen=True)
class Sample:
    """One sample, or a whole batch of coupled rows.

    Attributes:
        verdict, reason: As in `LocalCertificate`.
        error, gradient, radius, parameter, input: As in `LocalCertificate`.
        spectral_radius, least: Estimates: of J, and of the least singular value of I - J.
        seen: How many different points the solver ended at.
    """

    verdict: Verdict
    reason: str = ""
    error: float = math.inf
    gradient: float = math.inf
    radius: float = 0.0
    spectral_radius: float = math.nan
    least: float = math.nan
    seen: int = 1
    parameter: float = math.inf
    input: float = math.inf


def assembled(followed: Followed, samples: list[Sample], everywhere: Certificate, runs: int) -> LocalCertificate:
    subject = f"Each of the {len(samples)} samples"
    if followed.coupled:
        samples = samples * followed.batch
        subject = f"The batch of {followed.batch} coupled rows, which is one sample,"
    found = followed.coupled and not followed.layer.coupled
    remarks = (*as_rounded(tuple(followed.computed)), *([_OF_THIS_BATCH.format(followed.batch)] if found else []))
    verdicts = tuple(sample.verdict for sample in samples)
    open_ones = [i for i, verdict in enumerate(verdicts) if verdict is Verdict.UNDECIDED]
    double = [i for i, verdict in enumerate(verdicts) if verdict is Verdict.VIOLATED]
    total = len(samples)
    proved = total - len(open_ones)
    hypotheses = [
        Hypothesis(
            "samples with one equilibrium in a ball", "[krawczyk1969]", float(proved), float(total), ">=",
            True if total and not open_ones else None,
        )
    ]  # fmt: skip
    notes: list[str] = []
    licenses: tuple[str, ...] = ()
    if double:
        hypotheses.append(
            Hypothesis("samples with two equilibria, proved", "the balls are disjoint", float(len(double)), 0.0, "<=", False)
        )
        notes.append(
            f"{len(double)} of {total} samples (first: index {double[0]}) have two different equilibria, each proved: there is "
            "more than one. The bounds are about the one near z."
        )
    if open_ones:
        notes.append(f"{len(open_ones)} of {total} samples (first: index {open_ones[0]}): {samples[open_ones[0]].reason}")
    if not total:
        notes.append("There are no samples.")
    verdict = Verdict.VIOLATED if double else Verdict.UNDECIDED if open_ones or not total else Verdict.CERTIFIED
    if verdict is Verdict.CERTIFIED:
        alone = everywhere.certified and all(sample.radius == math.inf for sample in samples)
        where = (
            "and no other anywhere"
            if alone
            else "in a ball around it, or around a point near it where the radius is 0; others far away are not excluded"
        )
        licenses = (
            f"{subject} has exactly one equilibrium {where}. `error_bound` bounds |z - z*| (largest: "
            f"{_largest(samples, 'error')}), `gradient_error` the relative error of the adjoint (largest: "
            f"{_largest(samples, 'gradient')}), in exact arithmetic for the stored weights.",
        )
    if proved:
        notes.append(ASSUMED)
    if not everywhere.certified:
        count = "1 start" if runs == 1 else f"{runs} starts"
        notes.append(f"Numbers called estimates, and equilibria seen from {count}, are evidence and prove nothing.")
    return LocalCertificate(
        "local",
        verdict,
        tuple(hypotheses),
        licenses=licenses,
        measured=_measured(samples),
        note=" ".join((*notes, *remarks)),
        others=(everywhere,),
        verdicts=verdicts,
        error_bound=_column(samples, "error"),
        gradient_error=_column(samples, "gradient"),
        parameter_error=_column(samples, "parameter"),
        input_error=_column(samples, "input"),
        radius=_column(samples, "radius"),
        reasons=tuple(sample.reason for sample in samples),
    )


def as_rounded(operations: tuple[str, ...]) -> tuple[str, ...]:
    """A sentence about operations that are not known, of parameters and of x alone."""
    if not operations:
        return ()
    return (f"Taken as it was rounded: what {', '.join(operations[:4])} gives of parameters or x.",)


def _column(samples: list[Sample], name: str) -> Tensor:
    return torch.tensor([getattr(sample, name) for sample in samples], dtype=torch.float64)


def _largest(samples: list[Sample], name: str) -> str:
    """Of an upper bound, with three digits, rounded up."""
    largest = max(getattr(sample, name) for sample in samples)
    return f"{_THREE_DIGITS.create_decimal_from_float(largest):g}" if math.isfinite(largest) else "infinite"


def _measured(samples: list[Sample]) -> dict[str, float]:
    """The worst of each number, over the samples that have it."""

    def worst(name: str, choose: Callable[[list[float]], float]) -> float:
        values = [getattr(sample, name) for sample in samples if not math.isnan(getattr(sample, name))]
        return float(choose(values)) if values else math.nan

    return {
        "error bound, largest": worst("error", max),
        "gradient error, largest": worst("gradient", max),
        "radius, least": worst("radius", min),
        "spectral radius of J, estimate": worst("spectral_radius", max),
        "least singular value of I - J, estimate": worst("least", min),
        "equilibria seen, most": worst("seen", max),
    }
