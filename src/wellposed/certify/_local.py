"""One equilibrium near the z that was found, sample by sample; and a second one, if there is."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from wellposed.certify._balls import Boxes
from wellposed.certify._evidence import linearised, starts
from wellposed.certify._followed import Followed
from wellposed.certify._krawczyk import Enclosure, enclose, gradient_errors
from wellposed.certify._rows import DEPENDENT, agree
from wellposed.certify._sample import Sample, assembled
from wellposed.certify._tape import TapeRefused
from wellposed.certify.certificate import Certificate, Verdict
from wellposed.certify.local_certificate import LocalCertificate
from wellposed.linalg.directed import ROUNDING, down, up, vector_norm_upper

#: Entries of a state up to which it is proved: the proof multiplies (n, n) matrices.
LARGEST_STATE = 2048
#: Points further apart than this, of their size, may be different equilibria; residuals are smaller.
_APART = 1e-3


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
    return assembled(followed, samples, everywhere, len(more) + 1)


def without_proof(followed: Followed, everywhere: Certificate, reason: str) -> LocalCertificate:
    """All samples UNDECIDED; what the layer itself raises at this input is raised."""
    z, _ = followed.solve()
    return assembled(followed, [Sample(Verdict.UNDECIDED, reason)] * len(z), _of_rows(followed, everywhere), 1)


def _of_rows(followed: Followed, everywhere: Certificate) -> Certificate:
    """UNDECIDED if the solve found that rows are coupled: nothing said of one row is true."""
    if not followed.coupled or followed.layer.coupled:
        return everywhere
    return replace(everywhere, verdict=Verdict.UNDECIDED, licenses=(), note=DEPENDENT)


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
) -> Sample:
    eps = torch.finfo(z.dtype).eps
    z, image = z.double().cpu(), image.double().cpu()
    if objection:
        return Sample(Verdict.UNDECIDED, objection)
    if not bool(torch.isfinite(z).all() and torch.isfinite(image).all()):
        return Sample(Verdict.UNDECIDED, "The solver found no point at which the cell is finite.")
    try:
        boxes = Boxes(followed.tape(index))
    except TapeRefused as refused:
        return Sample(Verdict.UNDECIDED, str(refused))
    value = boxes.at(z).value
    again = value.mid.reshape(-1)
    if in_batch is not None and not agree((again, value.rad.reshape(-1)), in_batch, boxes.tape):
        return Sample(Verdict.UNDECIDED, DEPENDENT)  # by x: its tape excludes that they do by z
    if not float((again - image).abs().max()) <= math.sqrt(eps) * (1 + float(image.abs().max())):
        reason = (
            "The cell does not repeat what it gave for this sample: it keeps a state, or its rows depend on each other. "
            "Give coupled=True to the layer if they do."
        )
        return Sample(Verdict.UNDECIDED, reason)
    if any(step.of_z and step.function is not None and step.function.remark for step in boxes.tape.steps):
        # what is proved for every input leaves out a jump, so near it nothing follows here
        everywhere = replace(everywhere, verdict=Verdict.UNDECIDED, licenses=())
    by_contraction = _error_of_contraction(z, again, value.rad.reshape(-1), everywhere)
    if z.numel() > LARGEST_STATE:
        if by_contraction < math.inf:
            return Sample(Verdict.CERTIFIED, error=by_contraction, radius=math.inf)
        reason = f"The state has {z.numel()} entries; a sample is proved up to {LARGEST_STATE}."
        return Sample(Verdict.UNDECIDED, reason)
    enclosure, J = enclose(boxes, z)
    estimates = (math.nan, math.nan) if J is None else linearised(J)
    apart = _apart(z, others)
    if enclosure is None:
        if by_contraction < math.inf:
            return Sample(Verdict.CERTIFIED, "", by_contraction, math.inf, math.inf, *estimates)
        return Sample(Verdict.UNDECIDED, _why(z, image, estimates), math.inf, math.inf, 0.0, *estimates, 1 + len(apart))
    error = min(enclosure.error_at(z), by_contraction)
    gradient = math.inf if boxes.tape.hides else enclosure.gradient_error_at(z)
    radius = math.inf if everywhere.certified else enclosure.radius_at(z)
    second = _second(boxes, enclosure, apart)
    verdict = Verdict.CERTIFIED if second is None else Verdict.VIOLATED
    others_of = gradient_errors(boxes, enclosure, z)
    return Sample(verdict, "", error, gradient, radius, *estimates, 1 + len(apart), *others_of)


def _at_rounded(sample: Sample, gap: Tensor) -> Sample:
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
