"""`prove`: descent from the present parameters, followed step by step until the tail holds."""

from __future__ import annotations

import importlib
import math
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from wellposed._checks import check_positive_integer
from wellposed._progress import progress_display
from wellposed.certify import Verdict
from wellposed.descent import Callback
from wellposed.descent.recorder import PROGRESS_LINE, check_callbacks
from wellposed.errors import InvalidArgument, InvalidType
from wellposed.linalg.directed import up
from wellposed.prove._jacobian import Jacobian
from wellposed.prove._network import read_network
from wellposed.prove._point import Evaluator, Point
from wellposed.prove._problem import Exact, Parameters, Problem
from wellposed.prove._shadow import Refused, Row, shadow_step
from wellposed.prove._smooth_tail import smooth_tail
from wellposed.prove._tail import Tail, tail
from wellposed.prove.error_free import norm_up
from wellposed.prove.proof import ASSUMPTIONS, LIBRARY, Proof

#: The tail is tried whenever the loss has fallen by this factor, and is below this part of the first loss.
_FALL, _FIRST = 0.5, 1e-2
#: Checkpoints that are kept: between this many and twice as many.
_CHECKPOINTS = 20


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


def prove(
    model: torch.nn.Module,
    X: Tensor,
    y: Tensor,
    *,
    step_size: str | float = "auto",
    max_steps: int = 10_000,
    callbacks: Iterable[Callback] = (),
    resume: Proof | str | os.PathLike[str] | None = None,
    progress: bool = False,
) -> Proof:
    r"""Proves, if it can, that plain gradient descent from the present parameters ends at zero loss.

    Descent theta <- theta - eta grad |r|^2/2, r = f - y, on all parameters with one step size, in exact
    arithmetic. It is computed in float64 and followed by a bound of the distance to exact descent;
    at some step K a theorem about the tail takes over. See the page 'What is proved, when'. The
    parameters of the model are not changed.

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
    problem, at = read_network(model, X, y)
    run = _Run(problem, at, step_size)
    if resume is not None:
        run.continue_from(resume if isinstance(resume, Proof) else Proof.load(Path(resume)), step_size)
    with progress_display("prove: step", max_steps, show=progress, line=PROGRESS_LINE, ends=False) as display:
        try:
            while run.result is None:
                run.advance(max_steps)
                display.update(run.step, run.text)
                state = ProofStep(run.step, run.loss, run.delta, run.ratio, run.last_attempt, run.proof)
                answers = [callback.on_step(state) for callback in callbacks]  # type: ignore[arg-type]
                if run.result is None and any(answer is True for answer in answers):
                    run.result = "stopped by a callback"
        except KeyboardInterrupt:
            run.result = "interrupted; pass this proof as `resume` to continue"
    return run.proof()


class CallablePackage(ModuleType):
    """The class of `wellposed.prove`: a package that is called like the function of its name, and
    pickles by name."""

    def __call__(self, model: torch.nn.Module, X: Tensor, y: Tensor, **options: Any) -> Proof:
        return prove(model, X, y, **options)

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return importlib.import_module, (self.__name__,)

    def __dir__(self) -> list[str]:
        """The public names, without what the package imports."""
        return list(self.__all__)


CallablePackage.__call__.__doc__ = prove.__doc__


def _check_step_size(step_size: Any) -> None:
    if isinstance(step_size, str):
        if step_size != "auto":
            raise InvalidArgument(f"step_size must be 'auto' or a positive number; got {step_size!r}.")
    elif isinstance(step_size, bool) or not isinstance(step_size, (int, float)):
        raise InvalidType(f"step_size must be 'auto' or a positive number; got {step_size!r}.")
    elif not 0 < step_size < math.inf:
        raise InvalidArgument(f"step_size must be a positive finite number; got {step_size!r}.")


class _Run:
    """The state of a proof between two steps; `result` is None while it runs, "" once it is proved,
    else the reason why it ended."""

    def __init__(self, problem: Problem, at: Parameters, step_size: str | float) -> None:
        self.problem, self._at, self._origin = problem, at, at
        self._evaluator = Evaluator(problem)
        self.step, self.delta, self.result = 0, 0.0, None
        self._rows: list[Row] = []
        self._attempts: list[dict[str, Any]] = []
        self._checkpoints: dict[int, dict[str, Tensor]] = {}
        self._stride, self._below, self._before = 1, math.inf, 0.0
        self._tail: Tail | None = None
        self._began = time.perf_counter()
        self.eta = 0.0
        self._evaluate()
        largest = float(torch.linalg.eigvalsh(self._jacobian.H)[-1])
        self.eta = 1.0 / largest if isinstance(step_size, str) else float(step_size)
        if not self.eta * largest <= 2:
            raise InvalidArgument(
                f"prove: step_size = {self.eta:.6g} is above 2/lambda_max = {2 / largest:.6g} of the tangent kernel, "
                'where descent diverges; take "auto", which is 1/lambda_max.'
            )
        self._keep()

    result: str | None
    loss: float
    ratio: float | None = None

    @property
    def last_attempt(self) -> dict[str, Any] | None:
        return self._attempts[-1] if self._attempts else None

    def _evaluate(self) -> None:
        contraction = self._evaluator.contraction
        contraction.update(self._at.R)
        if not contraction.omega < 1:
            raise InvalidArgument(
                f"prove: omega, the largest eigenvalue of (R + R^T)/2, is {contraction.omega:.6g} and must be below 1, or an "
                "equilibrium need not exist; start with smaller recurrent weights."
            ) if self.step == 0 else Refused(f"omega = {contraction.omega:.6g} is not below 1")
        self._point: Point = self._evaluator.evaluate(self._at)
        self._jacobian = Jacobian(self.problem, self._point, contraction)
        self.loss = self._point.loss

    def advance(self, max_steps: int) -> None:
        """One step, or the end."""
        try:
            early = self.problem.slopes.smooth or (self._rows and self.loss < _FIRST * self._rows[0].loss)
            if early and self.loss < self._below:
                self._try_tail()
            if self.result is None and norm_up(self._point.r) <= 4 * norm_up(self._point.r_error):
                self.result = f"the loss {self.loss:.3g} is at its rounding error, and the tail did not hold"
            if self.result is not None:
                return
            if self.step >= max_steps:
                self.result = f"max_steps = {max_steps} steps did not suffice"
                return
            contraction = self._evaluator.contraction
            following, delta, row = shadow_step(self.problem, self._point, self._jacobian, contraction, self.eta, self.delta)
            if self.step and not self.step % self._stride:
                self._keep()
            # from here to the end of this block nothing may be interrupted half-way: plain assignments
            self._at, self.delta, self.ratio = following, delta, row.mask_ratio
            self._rows.append(row)
            self.step += 1
            self._evaluate()
        except Refused as refusal:
            self.result = str(refusal)

    def _try_tail(self) -> None:
        self._below = _FALL * self.loss
        tried = smooth_tail if self.problem.slopes.smooth else tail
        found = tried(self.problem, self._point, self._jacobian, self._evaluator.contraction, self.eta, self.delta)
        if found.holds:
            self._tail, self.result = found, ""
        else:
            self._attempts.append({"step": self.step, "loss": self.loss, "reason": found.reason})

    def text(self) -> str:
        """For the progress display."""
        parts = [f"loss {self.loss:.3e}", f"delta {self.delta:.1e}"]
        if self.ratio is not None:
            parts.append(f"mask ratio {self.ratio:.1e}")
        if self._attempts:
            parts.append(f"tail tried at {self._attempts[-1]['step']}: {self._attempts[-1]['reason']}")
        return ", ".join(parts)

    def _keep(self) -> None:
        """A checkpoint; when there are too many, every second one is dropped."""
        point = self._point
        kept: dict[str, Tensor] = {}
        for part, value in point.at.parts().items():
            if part in self.problem.trained or self.step == 0:
                kept[part] = value.high
                if bool(value.low.any()):
                    kept[f"{part}.low"] = value.low.float()
        kept |= {"Z": point.Z, "P": point.P, "r": point.r}
        if self.problem.rectified:
            kept |= {"Q": point.Q, "C": point.C}
        self._checkpoints[self.step] = kept
        if len(self._checkpoints) > 2 * _CHECKPOINTS:
            self._stride *= 2
            self._checkpoints = {step: kept for step, kept in self._checkpoints.items() if step % self._stride == 0}

    def proof(self) -> Proof:
        """The proof so far."""
        self._keep()
        problem, found = self.problem, self._tail
        steps = {item.name: [getattr(row, item.name) for row in self._rows] for item in fields(Row)}
        steps["delta"] = [*steps["delta"], self.delta]
        distance = None
        if found is not None:
            distance = up(math.sqrt(sum(
                ((norm_up(self._at.parts()[part].high - self._origin.parts()[part].high) + 2e-16 * norm_up(self._at.parts()[part].high))
                 / problem.scales[part]) ** 2 for part in problem.trained)) + self.delta + found.radius)
        return Proof(
            verdict=Verdict.UNDECIDED if found is None else Verdict.CERTIFIED,
            reason=("not finished" if self.result is None else self.result),
            step_size=self.eta,
            num_steps=self.step,
            delta=self.delta,
            loss=self.loss,
            radius=None if found is None else found.radius,
            rate=None if found is None else found.rate,
            distance=distance,
            seconds=self._before + time.perf_counter() - self._began,
            family=problem.family,
            activation=problem.slopes.name,
            sizes={"n": problem.n, "m": self._at.R.high.shape[0], "d": problem.d},
            steps=steps,
            tail=None if found is None else found.numbers,
            attempts=list(self._attempts),
            assumptions=ASSUMPTIONS + ((LIBRARY,) if problem.slopes.smooth else ()),
            _problem=problem,
            _at=self._at,
            _checkpoints=dict(self._checkpoints),
        )

    def continue_from(self, old: Proof, step_size: str | float) -> None:
        """Takes over the steps of a proof of the same problem."""
        same = old._problem is not None and old._problem.start.keys() == self.problem.start.keys()
        if same and old._problem is not None:
            pairs = [(old._problem.start[name], value) for name, value in self.problem.start.items()]
            pairs += [(old._problem.X, self.problem.X), (old._problem.y, self.problem.y)]
            same = all(a.shape == b.shape and bool((a == b).all()) for a, b in pairs)
        if not same or old._at is None:
            raise InvalidArgument(
                "prove: `resume` is a proof about another network, another start or other data; "
                "pass the model with the parameters that it had at the start."
            )
        if not isinstance(step_size, str) and float(step_size) != old.step_size:
            raise InvalidArgument(
                f"prove: `resume` has step_size = {old.step_size!r}, got {step_size!r}; leave step_size out to continue."
            )
        columns = [item.name for item in fields(Row)]
        self._rows = [Row(*(old.steps[name][k] for name in columns)) for k in range(old.num_steps)]
        self._at, self.delta, self.step, self.eta = old._at, old.delta, old.num_steps, old.step_size
        self._attempts, self._before = list(old.attempts), old.seconds
        self._checkpoints = dict(old._checkpoints)
        while len(self._checkpoints) > 1 and self._stride * 2 * _CHECKPOINTS < self.step:
            self._stride *= 2
        self._below = _FALL * self._attempts[-1]["loss"] if self._attempts else math.inf
        self._evaluate()
