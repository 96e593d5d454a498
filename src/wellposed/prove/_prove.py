"""`prove`: descent from the present parameters, followed step by step until the tail holds."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
from torch import Tensor

from wellposed._checks import check_positive_integer
from wellposed._package import CallablePackage
from wellposed._progress import progress_display
from wellposed.certify import Verdict
from wellposed.descent.recorder import check_callbacks
from wellposed.errors import InvalidArgument, InvalidType
from wellposed.nn.families import AbstractNetwork
from wellposed.prove._monotone import curvature_at_start
from wellposed.prove._network import read_network
from wellposed.prove._run import ProofRun
from wellposed.prove._shadow import Row
from wellposed.prove.proof import Proof


@dataclass(frozen=True)
class ProofStep:
    """What callbacks of `prove` get after every step.

    Attributes:
        step: Steps followed so far. loss: |r|^2/2 at this point. delta: See `Proof`.
        mask_ratio: Least ratio of this step; None for smooth activations.
        attempt: The last try of the tail, None before the first.
        proof: The proof so far, UNDECIDED; a function, because it copies.
    """

    step: int
    loss: float
    delta: float
    mask_ratio: float | None
    attempt: dict[str, Any] | None
    proof: Any


class ProofCallback(Protocol):
    """Any object with this method."""

    def on_step(self, state: ProofStep) -> bool | None:
        """Called after every step; True stops."""


def prove(
    model: torch.nn.Module,
    X: Tensor,
    y: Tensor,
    *,
    step_size: str | float = "auto",
    max_steps: int = 10_000,
    callbacks: Iterable[ProofCallback] = (),
    resume: Proof | str | os.PathLike[str] | None = None,
    progress: bool = False,
) -> Proof:
    r"""Proves, if it can, that plain gradient descent from the present parameters ends at zero
    loss.

    Descent theta <- theta - eta grad |r|^2/2, r = f - y, on all parameters with one step size, in
    exact arithmetic. It is computed in float64 and followed by a bound of the distance to exact
    descent; at some step K a theorem about the tail takes over. See the page 'What is proved,
    when'. The parameters of the model are not changed.

        >>> import torch, wellposed as wp
        >>> generator = torch.Generator().manual_seed(0)
        >>> model = wp.GaussianDEQ(5, 60, generator=generator, dtype=torch.float64)
        >>> X, y = torch.randn(2, 5, generator=generator).double(), torch.tensor([0.5, -0.5]).double()
        >>> wp.prove(model, X, y).verdict
        <Verdict.CERTIFIED: 'certified'>

    Args:
        model: `GaussianDEQ` (ReLU, tanh or softplus), `SkipDEQ` or `ImplicitOnlyDEQ`, in float64.
        X: (n, d) inputs, all different, n at most the width.
        y: (n,) targets.
        step_size: eta; "auto" is 1/lambda_max of the tangent kernel at the start.
        max_steps: Most steps to follow.
        callbacks: Objects with `on_step(state)`, called after every step with its numbers (`step`,
            `loss`, `delta`, `mask_ratio`, `attempt`, `proof()`); True stops.
        resume: A proof of the same problem that was stopped, or its folder: continue there.
        progress: Whether to show a progress display.

    Returns:
        The proof. After a KeyboardInterrupt, at `max_steps` or if a hypothesis fails it is
        UNDECIDED, and has all steps so far.

    Raises:
        InvalidArgument, InvalidType: The network, the data or the step size cannot have a proof.
    """
    callbacks = check_callbacks(callbacks)
    check_positive_integer("prove", "max_steps", max_steps)
    _check_step_size(step_size)
    if not (resume is None or isinstance(resume, (Proof, str, os.PathLike))):
        raise InvalidType(f"resume must be a proof or the folder of one; got {type(resume).__name__}.")
    with torch.device("cpu"):  # whatever the default of the caller is
        found = read_network(model, X, y)
        if found is None:
            return _without_theorem(model, X, y)  # type: ignore[arg-type]  # a theory network, as was checked
        run = ProofRun(*found, step_size)
        if resume is not None:
            run.continue_from(resume if isinstance(resume, Proof) else Proof.load(resume), step_size)
    with progress_display("prove", show=progress, line="{text}", bar=None, heading=run.heading(), ends=False) as display:
        try:
            while run.result is None:
                with torch.device("cpu"):
                    run.advance(max_steps)
                display.update(run.step, run.text)
                state = ProofStep(**run.state(), proof=run.proof)
                answers = [callback.on_step(state) for callback in callbacks]
                if run.result is None and any(answer is True for answer in answers):
                    run.result = "stopped by a callback"
        except KeyboardInterrupt:
            run.result = "interrupted; pass this proof as `resume` to continue"
    return run.proof()


def _without_theorem(model: AbstractNetwork, X: Tensor, y: Tensor) -> Proof:
    """UNDECIDED, with the number that fails."""
    eta, growth, loss = curvature_at_start(model, X, y)
    name = type(model).__name__
    reason = (
        f"{name} has no proof yet: with the bounds that are known, errors may grow by the factor {1 + growth:.3g} in the first "
        "step alone (1 + eta M), and it must be near 1"
    )
    steps: dict[str, list[Any]] = {item.name: [] for item in fields(Row)}
    sizes = {"n": X.shape[0], "m": model.width, "d": model.in_features}
    return Proof(
        verdict=Verdict.UNDECIDED,
        reason=reason,
        step_size=eta,
        num_steps=0,
        delta=0.0,
        loss=loss,
        radius=None,
        rate=None,
        distance=None,
        seconds=0.0,
        family=name,
        activation="relu",
        sizes=sizes,
        steps=steps | {"delta": [0.0]},
        tail=None,
    )


class ProvePackage(CallablePackage):
    """The class of `wellposed.prove`, which is called like the function of its name."""

    def __call__(
        self,
        model: torch.nn.Module,
        X: Tensor,
        y: Tensor,
        *,
        step_size: str | float = "auto",
        max_steps: int = 10_000,
        callbacks: Iterable[ProofCallback] = (),
        resume: Proof | str | os.PathLike[str] | None = None,
        progress: bool = False,
    ) -> Proof:
        return prove(
            model, X, y, step_size=step_size, max_steps=max_steps, callbacks=callbacks, resume=resume, progress=progress
        )


ProvePackage.__call__.__doc__ = prove.__doc__


def _check_step_size(step_size: Any) -> None:
    if isinstance(step_size, str):
        if step_size != "auto":
            raise InvalidArgument(f"step_size must be 'auto' or a positive number; got {step_size!r}.")
    elif isinstance(step_size, bool) or not isinstance(step_size, (int, float)):
        raise InvalidType(f"step_size must be 'auto' or a positive number; got {step_size!r}.")
    elif not 0 < step_size < math.inf:
        raise InvalidArgument(f"step_size must be a positive finite number; got {step_size!r}.")
