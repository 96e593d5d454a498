"""One equilibrium near the z that was found, sample by sample; and a second one, if there is."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from decimal import ROUND_CEILING, Context

import torch
from torch import Tensor

from wellposed.certify._balls import Boxes
from wellposed.certify._evidence import linearised, starts
from wellposed.certify._followed import Followed
from wellposed.certify._krawczyk import Enclosure, enclose, gradient_errors
from wellposed.certify._rows import DEPENDENT, agree
from wellposed.certify._tape import TapeRefused
from wellposed.certify.certificate import Certificate, Hypothesis, Verdict
from wellposed.certify.local_certificate import LocalCertificate
from wellposed.linalg.directed import ROUNDING, down, up, vector_norm_upper

#: Entries of a state up to which it is proved: the proof multiplies (n, n) matrices.
LARGEST_STATE = 2048
#: Points further apart than this, of their size, may be different equilibria; residuals are smaller.
_APART = 1e-3
#: Where the solve, and not `coupled=True`, made one sample of a batch.
_OF_THIS_BATCH = (
    "Rows depend on each other: f of a row alone is not f of it in this batch. So this is about the batch of {} rows, and says "
    "nothing about a row alone, or in another batch. If that is meant, give coupled=True to the layer."
)
#: What no evaluation shows; mistakes in it are searched for, see `_repeated` and `_outside`.
ASSUMED = "Assumed: the cell is a function of z and x."


_THREE_DIGITS = Context(prec=3, rounding=ROUND_CEILING)


@dataclass(frozen=True)
class _Sample:
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


def local_certificate(followed: Followed, everywhere: Certificate) -> LocalCertificate:
    """What is proved at the equilibria that a layer finds.

    Args:
        followed: The layer and its input.
        everywhere: What is proved for every input.
    """
    z, image = followed.solve()
    objection = followed.objection() or followed.objection_to_rows(followed.batch)
    everywhere = _of_rows(followed, everywhere)
    in_batch = None if objection or followed.coupled or not len(z) > 1 else followed.values_in_batch(z)
    more = [] if everywhere.certified or objection or not len(z) else followed.solve_from(starts(z))
    samples = []
    for i in range(len(z)):
        there = None if in_batch is None else (in_batch[0][i], in_batch[1][i])
        others = [(value[i], at[i]) for value, at in more if value.shape == z.shape]
        sample = _sample(followed, i, z[i], image[i], there, others, everywhere, objection)
        samples.append(sample if followed.rounding is None else _at_rounded(sample, followed.rounding[i]))
    return _assembled(followed, samples, everywhere, len(more) + 1)


def without_proof(followed: Followed, everywhere: Certificate, reason: str) -> LocalCertificate:
    """All samples UNDECIDED; what the layer itself raises at this input is raised."""
    z, _ = followed.solve()
    return _assembled(followed, [_Sample(Verdict.UNDECIDED, reason)] * len(z), _of_rows(followed, everywhere), 1)


def _of_rows(followed: Followed, everywhere: Certificate) -> Certificate:
    """UNDECIDED if the solve found that rows are coupled: nothing said of one row is true."""
    if not followed.coupled or followed.layer.coupled:
        return everywhere
    return replace(everywhere, verdict=Verdict.UNDECIDED, licenses=(), note=DEPENDENT)


def as_rounded(operations: tuple[str, ...]) -> tuple[str, ...]:
    """A sentence about operations that are not known, of parameters and of x alone."""
    if not operations:
        return ()
    return (f"Taken as it was rounded: what {', '.join(operations[:4])} gives of parameters or x.",)


def second_equilibrium(followed: Followed) -> Certificate | None:
    """VIOLATED, if the one sample of an input has two different equilibria, both proved."""
    plain = Certificate("contraction", Verdict.UNDECIDED)
    found = local_certificate(followed, plain)
    if found.verdict is not Verdict.VIOLATED:
        return None
    note = "For an input of zeros two different equilibria are proved, so there is not one equilibrium for every input."
    return Certificate("uniqueness", Verdict.VIOLATED, found.hypotheses[-1:], note=note)


def _sample(
    followed: Followed,
    index: int,
    z: Tensor,
    image: Tensor,
    in_batch: tuple[Tensor, Tensor] | None,
    others: list[tuple[Tensor, Tensor]],
    everywhere: Certificate,
    objection: str,
) -> _Sample:
    eps = torch.finfo(z.dtype).eps
    z, image = z.double().cpu(), image.double().cpu()
    if objection:
        return _Sample(Verdict.UNDECIDED, objection)
    if not bool(torch.isfinite(z).all() and torch.isfinite(image).all()):
        return _Sample(Verdict.UNDECIDED, "The solver found no point at which the cell is finite.")
    try:
        boxes = Boxes(followed.tape(index))
    except TapeRefused as refused:
        return _Sample(Verdict.UNDECIDED, str(refused))
    value = boxes.at(z).value
    again = value.mid.reshape(-1)
    if in_batch is not None and not agree((again, value.rad.reshape(-1)), in_batch, boxes.tape):
        return _Sample(Verdict.UNDECIDED, DEPENDENT)  # by x: its tape excludes that they do by z
    if not float((again - image).abs().max()) <= math.sqrt(eps) * (1 + float(image.abs().max())):
        reason = (
            "The cell does not repeat what it gave for this sample: it keeps a state, or its rows depend on each other. "
            "Give coupled=True to the layer if they do."
        )
        return _Sample(Verdict.UNDECIDED, reason)
    if any(step.of_z and step.function is not None and step.function.remark for step in boxes.tape.steps):
        # what is proved for every input leaves out a jump, so near it nothing follows here
        everywhere = replace(everywhere, verdict=Verdict.UNDECIDED, licenses=())
    by_contraction = _error_of_contraction(z, again, value.rad.reshape(-1), everywhere)
    if z.numel() > LARGEST_STATE:
        if by_contraction < math.inf:
            return _Sample(Verdict.CERTIFIED, error=by_contraction, radius=math.inf)
        reason = f"The state has {z.numel()} entries; a sample is proved up to {LARGEST_STATE}."
        return _Sample(Verdict.UNDECIDED, reason)
    enclosure, J = enclose(boxes, z)
    estimates = (math.nan, math.nan) if J is None else linearised(J)
    apart = _apart(z, others)
    if enclosure is None:
        if by_contraction < math.inf:
            return _Sample(Verdict.CERTIFIED, "", by_contraction, math.inf, math.inf, *estimates)
        return _Sample(Verdict.UNDECIDED, _why(z, image, estimates), math.inf, math.inf, 0.0, *estimates, 1 + len(apart))
    error = min(enclosure.error_at(z), by_contraction)
    gradient = math.inf if boxes.tape.hides else enclosure.gradient_error_at(z)
    radius = math.inf if everywhere.certified else enclosure.radius_at(z)
    second = _second(boxes, enclosure, apart)
    verdict = Verdict.CERTIFIED if second is None else Verdict.VIOLATED
    others_of = gradient_errors(boxes, enclosure, z)
    return _Sample(verdict, "", error, gradient, radius, *estimates, 1 + len(apart), *others_of)


def _at_rounded(sample: _Sample, gap: Tensor) -> _Sample:
    """The same about z as the layer returns it, with the rounding of each entry; gradients are
    taken before."""
    error = up(sample.error + vector_norm_upper(gap))
    radius = math.inf if sample.radius == math.inf else down(sample.radius - up(float(gap.max())))
    return replace(sample, error=error, radius=radius if error <= radius else 0.0)


def _why(z: Tensor, image: Tensor, estimates: tuple[float, float]) -> str:
    residual = float((image - z).norm() / image.norm().clamp(min=1e-300))
    if residual > 1e-2:
        return f"The solver did not come near an equilibrium: the relative residual is {residual:.1e}."
    return (
        f"No ball around z passes the test: the relative residual is {residual:.1e}, the least singular value of I - J about "
        f"{estimates[1]:.1e}. A kink of an activation may lie at z."
    )


def _error_of_contraction(z: Tensor, image: Tensor, rad: Tensor, everywhere: Certificate) -> float:
    """|z - z*| <= |z - f(z)|/(1 - q), if the map contracts by q for every input."""
    q = everywhere.hypotheses[0].value if everywhere.certified and everywhere.theorem == "contraction" else None
    if q is None or not q < 1:
        return math.inf
    gap = (image - z).abs()
    return up(vector_norm_upper(gap * (1 + 2 * ROUNDING) + rad) / down(1 - q))


def _apart(z: Tensor, others: list[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Points, different from z and from each other, at which the solver ended."""
    found: list[Tensor] = []
    for value, image in others:
        w, fw = value.double().cpu(), image.double().cpu()
        size = 1 + float(w.abs().max())
        if not float((fw - w).abs().max()) <= _APART * size:
            continue
        if all(float((w - known).abs().max()) > _APART * size for known in (z, *found)):
            found.append(w)
    return found


def _second(boxes: Boxes, first: Enclosure, candidates: list[Tensor]) -> Enclosure | None:
    """Another equilibrium, proved to exist and to be different."""
    for candidate in candidates:
        other, _ = enclose(boxes, candidate)
        if other is not None and first.differs(other):
            return other
    return None


def _assembled(followed: Followed, samples: list[_Sample], everywhere: Certificate, runs: int) -> LocalCertificate:
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


def _column(samples: list[_Sample], name: str) -> Tensor:
    return torch.tensor([getattr(sample, name) for sample in samples], dtype=torch.float64)


def _largest(samples: list[_Sample], name: str) -> str:
    """Of an upper bound, with three digits, rounded up."""
    largest = max(getattr(sample, name) for sample in samples)
    return f"{_THREE_DIGITS.create_decimal_from_float(largest):g}" if math.isfinite(largest) else "infinite"


def _measured(samples: list[_Sample]) -> dict[str, float]:
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
