"""The proof of a run: about plain descent from the start of its network, on some of its data."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wellposed import Proof, prove
from wellposed._io import check_outputs
from wellposed.certify import Verdict
from wellposed.errors import InvalidArgument, RunError
from wellposed.kernel import tangent_kernel
from wellposed.nn.families import is_theory_network
from wellposed.prove._prove import ProofStep
from wellposed_lab.runs.config import RunConfig
from wellposed_lab.runs.processes import on_threads, threads_for
from wellposed_lab.runs.setup import prepare

__all__ = ["FILES", "FOLDER", "about", "different_samples", "prove_start"]

#: Of a proof in a run directory.
FOLDER = "proof"
#: That a proof consists of.
FILES = ("proof.json", "proof.safetensors")
#: Seconds between two saves of an unfinished proof.
SAVE_EVERY = 60.0
#: Samples to choose from; their tangent kernel is a matrix of this size.
POOL = 1000


class _Saver:
    """A callback that saves the proof so far, now and then."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._last = folder, time.monotonic()

    def on_step(self, state: ProofStep) -> None:
        if time.monotonic() - self._last > SAVE_EVERY:
            state.proof().save(self._folder)
            self._last = time.monotonic()


def prove_start(
    config: RunConfig,
    folder: Path,
    *,
    samples: int | None = None,
    step_size: str | float = "auto",
    max_steps: int = 10_000,
    resume: bool = False,
    progress: bool = False,
) -> Proof:
    """Proves, if possible, that plain descent from the start of a configuration ends at zero loss.

    Args:
        config: Names the data, the network and its seed.
        folder: Where the proof is saved: at the end, every minute, and after Ctrl-C; nothing is if
            no step could be followed.
        samples: So many training samples, the `different_samples`; all if not given.
        step_size, max_steps: As in `wellposed.prove`.
        resume: Whether to continue the proof in the folder.
        progress: Whether to show it.
    """
    there = (folder / FILES[0]).exists()
    if resume and not there:
        raise RunError(f"{folder} holds no proof to continue; omit --resume to begin one there.")
    if there and not resume:
        raise RunError(f"{folder} holds a proof already; continue it with --resume, or choose another folder with --out.")
    if config.run.dtype != "float64":
        raise InvalidArgument(
            f"run.dtype is {config.run.dtype}, and a proof follows descent in float64; set run.dtype=float64."
        )
    problem = prepare(config)
    X, y = problem.parts.train
    if samples is not None:
        if not 1 <= samples <= len(X):
            raise InvalidArgument(f"A proof about {samples} samples needs as many: there are {len(X)} training samples.")
        index = different_samples(problem.model, X, samples)
        X, y = X[index], y[index]
    check_outputs(folder, FILES)
    options: dict[str, Any] = {"step_size": step_size, "max_steps": max_steps, "resume": folder if resume else None}
    try:
        with on_threads(threads_for(problem.model, X)):
            proof = prove(problem.model, X, y, **options, callbacks=[_Saver(folder)], progress=progress)
        if proof.can_be_saved:
            proof.save(folder)
    finally:
        with suppress(OSError):  # it has files
            folder.rmdir()
    return proof


def different_samples(model: nn.Module, X: Tensor, count: int) -> Tensor:
    """Indices of samples that determine each other least, in order: a small proof about much data.

    Greedy, by the diagonal that is left of the tangent kernel (Cholesky with pivots): descent on
    them is better conditioned than on the first ones. Chosen from the first 1,000.
    """
    if not is_theory_network(model):
        return torch.arange(count)  # `prove` refuses it with a sentence
    pool = X[: max(POOL, count)]
    rest = tangent_kernel(model, pool).detach().clone()
    chosen: list[int] = []
    for _ in range(count):
        left = rest.diagonal().clone()
        left[chosen] = -torch.inf
        chosen.append(int(left.argmax()))
        column = rest[:, chosen[-1]].clone()
        if column[chosen[-1]] > 0:
            rest = rest - column.unsqueeze(1) * column / column[chosen[-1]]
    return torch.tensor(sorted(chosen))


def about(proof: Proof, optimizer: str) -> str:
    """What the proof is about, and what it is not about, in a sentence or two."""
    n = proof.sizes["n"]
    what = f"plain gradient descent on all parameters from the same start, on {n} of the training samples, with step size"
    if proof.verdict is Verdict.CERTIFIED:
        return (
            f"PROVED: {what} {proof.step_size:.3g}, ends at zero loss; {proof.num_steps} steps are followed, then |r| falls by "
            f"the factor {proof.rate:.6g} a step or faster. Proved of descent, not of {optimizer}"
        )
    return f"undecided for {what} {proof.step_size:.3g}: {proof.reason} (step {proof.num_steps})"
