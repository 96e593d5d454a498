r"""Checks a stored proof anew, on any machine and in another way than it was made.

Nothing that computes numbers is shared with the prover. Inequalities between stored numbers are
checked in rational arithmetic (`verify_numbers`), points and steps in integers of 120 binary digits
after the point (`verify_step`), norms by Cholesky factorizations (`verify_bounds`).
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from wellposed._progress import ProgressDisplay
from wellposed.errors import InvalidArgument, InvalidType
from wellposed.prove.seal import seal, tensor_hash
from wellposed.prove.verify_digits import LOST
from wellposed.prove.verify_numbers import check_numbers, check_tail_numbers
from wellposed.prove.verify_place import Data, checkpoint_place, start_place
from wellposed.prove.verify_point import NotFound
from wellposed.prove.verify_reading import NOT_PROVED, StoredProof
from wellposed.prove.verify_step import check_segment
from wellposed.prove.verify_tail import check_tail

__all__ = ["Check", "Verification", "verify"]

_SUMMARIES = {
    "seal": "no number of proof.json was changed since it was written",
    "hashes": "the bytes of all tensors are those that proof.json names",
    "start": "the first point is the start of the network",
    "scales": "the parts that this family trains, with its scales",
    "step size": "positive",
    "delta": "delta_{k+1} >= (1 + eta M_k) delta_k + eps_k, for all steps",
    "error": "recomputed steps end within eps of the stored points",
    "digits": "bounds have six digits, and steps that need none have none",
    "jacobian": "eta L_k^2 <= 2 for all steps, and |J| computed again",
    "omega": "omega_k + k delta_k < 1 for all steps, and omega computed again",
    "mask": "no pre-activation is 0 in a ball, by the stored ratios and computed again",
    "expansion": "M_k >= |sum r_i Hess f_i|, bounded again in another way",
    "gradient": "eps_k >= eta |J^T r - G|, computed in 120 binary digits after the point",
    "loss": "computed again",
    "residual": "|r| of the exact iterate, bounded again",
    "verdict": "the file claims a proof",
    "distance": "how far the iterates are from the start",
    "tail": "all inequalities of the tail, and its constants at the points above",
    "equilibria": "equilibria and adjoints are enclosed at every recomputed point, and stored ones are near them",
}


@dataclass
class Check:
    """One kind of check.

    Attributes:
        name: What is checked.
        ok: Whether all of them held. count: How many there were.
        note: The first that failed, in words; empty if none did.
    """

    name: str
    ok: bool = True
    count: int = 0
    note: str = ""

    def __str__(self) -> str:
        text = self.note if not self.ok else _SUMMARIES.get(self.name, "")
        return f"{'holds' if self.ok else 'FAILS'}  {self.name:<15} {text} ({self.count} checked)"


@dataclass
class Verification:
    """The result of `verify`.

    Attributes:
        ok: Whether the folder holds a proof and every check held.
        checks: What was checked, in the order of the first occurrence.
        steps: The steps that were computed again in more digits.
        tail_points: The points of the tail's ball at which its constants were bounded again: the
            last, all checkpoints in the ball, and two beyond. The constants are about the whole
            ball, which these points sample.
        claim: What is proved, in a sentence; empty unless `ok`.

    Examples:
        >>> import tempfile, torch, wellposed as wp
        >>> X, y = wp.data.load("sphere", n=2, features=20, norm="sqrt_d", dtype=torch.float64)
        >>> model = wp.GaussianDEQ(20, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        >>> folder = tempfile.mkdtemp()
        >>> _ = wp.prove(model, X, y).save(folder)
        >>> verification = wp.verify(folder, steps=2)
        >>> verification.ok, all(check.ok for check in verification.checks)
        (True, True)
    """

    checks: list[Check] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    claim: str = ""
    tail_points: list[int] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return bool(self.checks) and all(check.ok for check in self.checks)

    def report(self, name: str, ok: bool, note: str) -> None:
        """Counts one check."""
        found = next((check for check in self.checks if check.name == name), None)
        if found is None:
            found = Check(name)
            self.checks.append(found)
        found.count += 1
        if found.ok and not ok:
            found.ok, found.note = False, note

    def __str__(self) -> str:
        head = f"VERIFIED: {self.claim}" if self.ok else "REJECTED: this is not a proof."
        again = f"Steps computed again in more digits: {len(self.steps)}."
        tail = (
            f"Points at which the constants of the tail were bounded again: {len(self.tail_points)}. "
            "They are about a whole ball, which these points sample."
        )
        other = f"Not part of the proof, and not checked: {', '.join(NOT_PROVED)}."
        return "\n".join([head, again, tail, other, *map(str, self.checks)])

    __repr__ = __str__


def verify(
    folder: str | os.PathLike[str], *, steps: int = 20, seed: int | None = None, display: ProgressDisplay | None = None
) -> Verification:
    """Checks the proof that `Proof.save` wrote into a folder.

    All inequalities of Theorem A and of the tail are checked from the stored numbers, without
    rounding. Random stretches between two checkpoints are computed again in more digits, until they
    have `steps` steps together; there also the constants are bounded again. At sizes of (n, m) =
    (20, 500) a step takes some seconds.

    Args:
        folder: With proof.json and proof.safetensors. It may come from a stranger: nothing in it is
            executed, and sizes are limited.
        steps: How many steps at least are computed again; all of them if there are fewer.
        seed: Of the choice of the stretches; None takes a new one each time, which a forger
            cannot know.
        display: Progress.

    Raises:
        InvalidArgument, InvalidType: There is no such folder, or an argument has no meaning.
        RunError: The folder does not hold the files of a proof.
        MissingPackage: python-flint is missing, and the network is smooth.

    Examples:
        >>> import tempfile, torch, wellposed as wp
        >>> X, y = wp.data.load("sphere", n=2, features=20, norm="sqrt_d", dtype=torch.float64)
        >>> model = wp.GaussianDEQ(20, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        >>> folder = tempfile.mkdtemp()
        >>> _ = wp.prove(model, X, y).save(folder)
        >>> wp.verify(folder, steps=2).ok
        True
    """
    if not isinstance(folder, (str, os.PathLike)):
        raise InvalidType(f"The folder of a proof must be a path; got {type(folder).__name__}.")
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise InvalidArgument(f"The 'steps' parameter of verify must be an integer of at least 1. Got {steps!r} instead.")
    path = Path(folder)
    if not path.is_dir():
        raise InvalidArgument(f"{path} is not a folder; give the folder that `proof.save` wrote.")
    proof, found = StoredProof(path), Verification()
    _check_hashes(proof, found)
    check_numbers(proof, found.report)
    if found.ok:
        check_tail_numbers(proof, found.report)
    if not found.ok:  # contradicts itself: its steps are not worth the time
        return found
    try:
        data = Data(proof)
        _check_start(proof, found)
        stretches = _chosen(proof, steps, random.Random(seed))
        total = sum(last - first for first, last in stretches) + 1

        def done(k: int) -> None:
            found.steps.append(k)
            if display is not None:
                display.update(len(found.steps), f"step {k} in more digits", total=total)

        for first, last in stretches:
            check_segment(proof, data, first, last, found.report, done)
        found.tail_points = check_tail(proof, data, found.report)
    except NotFound as problem:
        found.report("equilibria", False, f"no proof of {problem}")
    if found.ok:
        found.claim = _claim(proof)
    return found


def _check_hashes(proof: StoredProof, found: Verification) -> None:
    found.report("seal", proof.document.get("seal") == seal(proof.document), "proof.json was changed after it was written")
    names = proof.names()
    for name in sorted({*names, *map(str, proof.hashes)}):
        known = name in names and proof.hashes.get(name) == tensor_hash(proof.raw(name))
        found.report("hashes", known, f"{name[:60]} is not the tensor that proof.json names")


def _check_start(proof: StoredProof, found: Verification) -> None:
    """The first checkpoint against the start of the network, scaled: high + low has no rounding, so
    they are equal to the last digits of the check."""
    exact, stored = start_place(proof).parts(), checkpoint_place(proof, 0).parts()
    for part in proof.parts:
        fine = bool(np.abs((exact[part] - stored[part]).floats()).max() <= 8 * LOST * (1 + proof.scales[part]))
        found.report("start", fine, f"{part} of checkpoint 0 is not the parameter of the start, scaled")


def _chosen(proof: StoredProof, steps: int, generator: random.Random) -> list[tuple[int, int]]:
    """Stretches of steps that begin at random checkpoints.

    As many as there are steps to check, or all. Some of them, and more if there are too few, reach
    to the next checkpoint, where the computed point is known again.
    """
    pairs = list(zip(proof.checkpoints, proof.checkpoints[1:], strict=False))
    generator.shuffle(pairs)
    chosen: list[tuple[int, int]] = []
    more = steps
    for first, last in pairs[:steps]:
        whole = not chosen or last - first <= max(1, more) or len(pairs) < steps
        more -= last - first if whole else 0
        chosen.append((first, last if whole else first + 1))
    return sorted(chosen)


def _claim(proof: StoredProof) -> str:
    tail, document = proof.tail, proof.document
    assert tail is not None
    network = f"{proof.family} network, width {proof.m}, {proof.activation}"
    return (
        f"plain gradient descent on all trained parameters ({network}; {proof.n} samples) with the step size "
        f"{proof.step_size:.6g}, from the stored start, ends at zero loss: after {proof.K} steps |r| is at most "
        f"{tail['residual']:.3g}, and each further step multiplies it by at most {document['rate']!r}."
    )
