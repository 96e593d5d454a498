"""The state of a proof between two steps: what `prove` advances."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from wellposed.certify import Verdict
from wellposed.errors import InvalidArgument
from wellposed.linalg.directed import up
from wellposed.prove._jacobian import PredictionJacobian
from wellposed.prove._point import ComputedPoint, Evaluator
from wellposed.prove._problem import Parameters, ProvedProblem
from wellposed.prove._shadow import Row, StepRefused, shadow_step
from wellposed.prove._short import short_up
from wellposed.prove._smooth_tail import smooth_tail
from wellposed.prove._tail import Tail, tail
from wellposed.prove.error_free import norm_up
from wellposed.prove.proof import ASSUMPTIONS, LIBRARY, Proof

#: The tail is tried whenever the loss has fallen by this factor, and is below this part of the first loss; that of smooth
#: activations from the start. Once it is near, it is tried more often: units that slide make the verdict for ReLU vary from
#: step to step.
_FALL, _FIRST = 0.5, 1e-2
_FALL_NEAR, _NEAR = 0.8, 3.0
#: Checkpoints that are kept: between this many and twice as many.
_CHECKPOINTS = 20
#: What the gradient of a step is made of; the last two only if c is rectified.
_VALUES = ("Z", "P", "r", "Q", "C")


@dataclass(frozen=True)
class _Now:
    """Where a proof is: replaced as a whole, so that an interruption leaves nothing half-done."""

    step: int
    at: Parameters
    delta: float
    point: ComputedPoint
    jacobian: PredictionJacobian
    ratio: float | None = None


class ProofRun:
    """The state of a proof between two steps.

    Attributes:
        result: None while it runs, "" once it is proved, else the reason why it ended.
        eta: The step size.
    """

    def __init__(self, problem: ProvedProblem, at: Parameters, step_size: str | float) -> None:
        self.problem, self._origin = problem, at
        self._evaluator = Evaluator(problem)
        self.result: str | None = None
        self._rows: list[Row] = []
        self._attempts: list[dict[str, Any]] = []
        self._checkpoints: dict[int, dict[str, Tensor]] = {}
        self._stride, self._below, self._before = 1, math.inf, 0.0
        self._tail: Tail | None = None
        self._least: float | None = None
        self._began = time.perf_counter()
        try:
            self._now = _Now(0, at, 0.0, *self._evaluated(at))
        except StepRefused as refusal:
            raise InvalidArgument(
                f"prove: {refusal}, or an equilibrium need not exist; start with smaller recurrent weights."
            ) from None
        largest = float(torch.linalg.eigvalsh(self._now.jacobian.H)[-1])
        if not largest > 1e-300:
            raise InvalidArgument(
                f"prove: the tangent kernel is {largest:.3g} at the start (no unit is active, or the data are too small), so "
                "descent does not move; take another start or larger data."
            )
        self.eta = 1.0 / largest if isinstance(step_size, str) else float(step_size)
        if not self.eta * largest <= 2:
            raise InvalidArgument(
                f"prove: step_size = {self.eta:.6g} is above 2/lambda_max = {2 / largest:.6g} of the tangent kernel, "
                'where descent diverges; take "auto", which is 1/lambda_max.'
            )
        self._keep()

    @property
    def step(self) -> int:
        """Steps followed."""
        return self._now.step

    @property
    def loss(self) -> float:
        """|r|^2/2 at the present point."""
        return self._now.point.loss

    def state(self) -> dict[str, Any]:
        """The numbers of the present point, for callbacks."""
        now = self._now
        last = self._attempts[-1] if self._attempts else None
        return {"step": now.step, "loss": now.point.loss, "delta": now.delta, "mask_ratio": now.ratio, "attempt": last}

    def _evaluated(self, at: Parameters) -> tuple[ComputedPoint, PredictionJacobian]:
        contraction = self._evaluator.contraction
        contraction.update(at.R)
        if not contraction.omega < 1:
            raise StepRefused(f"omega, the largest eigenvalue of (R + R^T)/2, is {contraction.omega:.6g} and must be below 1")
        point = self._evaluator.evaluate(at)
        return point, PredictionJacobian(self.problem, point, contraction)

    def advance(self, max_steps: int) -> None:
        """One step, or the end."""
        now = self._now
        try:
            early = self.problem.slopes.smooth or (self._rows and self.loss < _FIRST * self._rows[0].loss)
            if early and self.loss < self._below:
                self._try_tail()
            if self.result is None and norm_up(now.point.r) <= 4 * norm_up(now.point.r_error):
                self.result = f"the loss {self.loss:.3g} is at its rounding error, and the tail did not hold"
            if self.result is None and now.step >= max_steps:
                self.result = f"max_steps = {max_steps} steps did not suffice"
            if self.result is not None:
                return
            contraction = self._evaluator.contraction
            at, delta, row = shadow_step(self.problem, now.point, now.jacobian, contraction, self.eta, now.delta)
            if now.step and not now.step % self._stride:
                self._keep()
            following = _Now(now.step + 1, at, delta, *self._evaluated(at), row.mask_ratio)
            self._rows[now.step :] = [row]  # an interruption may have left one too many
            self._now = following
            self._least = min((ratio for ratio in (self._least, row.mask_ratio) if ratio is not None), default=None)
        except StepRefused as refusal:
            self.result = str(refusal)

    def _try_tail(self) -> None:
        tried = smooth_tail if self.problem.slopes.smooth else tail
        now = self._now
        found = tried(self.problem, now.point, now.jacobian, self._evaluator.contraction, self.eta, now.delta)
        if found.holds:
            self._tail, self.result = found, ""
        else:
            self._attempts.append({"step": now.step, "loss": self.loss, "reason": found.reason, "shortfall": found.shortfall})
            self._below = _next_loss(self._attempts)

    def heading(self) -> str:
        """Above the columns of `text`: their names, and two sentences about them."""
        told = "Exact descent is within delta" + ("." if self.problem.slopes.smooth else "; mask ratios must stay above 1.")
        names = "  ".join(f"{name:>{width}}" for name, width in self._columns())
        return f"prove: plain descent is followed until a theorem proves the rest.\n{told}\n{names}"

    def text(self) -> str:
        """For the progress display: numbers of the present point, as wide as their names."""
        end = predicted_end(self._attempts)
        shown = [f"{self.step}", f"{self.loss:.1e}", f"{self._now.delta:.1e}"]
        if not self.problem.slopes.smooth:
            shown.append("-" if self._least is None else f"{self._least:.1e}")
        shown.append("not known yet" if end is None else f"step {max(end, self.step)}")
        return "  ".join(f"{value:>{width}}" for value, (_, width) in zip(shown, self._columns(), strict=True))

    def _columns(self) -> list[tuple[str, int]]:
        names = ["step", "loss", "delta", *([] if self.problem.slopes.smooth else ["least mask ratio"]), "predicted end"]
        return [(name, max(len(name), 9)) for name in names]

    def _keep(self) -> None:
        """A checkpoint; when there are too many, every second one is dropped."""
        point = self._now.point
        kept: dict[str, Tensor] = {}
        for part, value in point.at.parts().items():
            if part in self.problem.trained or self.step == 0:
                kept[part] = value.high
                if bool(value.low.any()):
                    short = value.low.float()  # exact, but for what a scale makes of the start
                    kept[f"{part}.low"] = short if torch.equal(short.double(), value.low) else value.low
        values = {name: getattr(point, name) for name in (_VALUES if self.problem.rectified else _VALUES[:3])}
        kept |= values | {f"{name}.low": point.lows[name] for name in values if bool(point.lows[name].any())}
        self._checkpoints[self.step] = kept
        if len(self._checkpoints) > 2 * _CHECKPOINTS:
            self._stride *= 2
            self._checkpoints = {
                step: kept for step, kept in self._checkpoints.items() if step % self._stride == 0 or step == self.step
            }

    def proof(self) -> Proof:
        """The proof so far."""
        self._keep()
        problem, found, now = self.problem, self._tail, self._now
        rows = self._rows[: now.step]
        steps: dict[str, list[Any]] = {item.name: [getattr(row, item.name) for row in rows] for item in fields(Row)}
        steps["delta"] = [*steps["delta"], now.delta]
        return Proof(
            verdict=Verdict.UNDECIDED if found is None else Verdict.CERTIFIED,
            reason=("not finished" if self.result is None else self.result),
            step_size=self.eta,
            num_steps=now.step,
            delta=now.delta,
            loss=self.loss,
            radius=None if found is None else found.radius,
            rate=None if found is None else found.rate,
            distance=None if found is None else short_up(up(self._moved() + now.delta + found.radius)),
            seconds=self._before + time.perf_counter() - self._began,
            family=problem.family,
            activation=problem.slopes.name,
            sizes={"n": problem.n, "m": now.at.R.high.shape[0], "d": problem.d},
            steps=steps,
            tail=None if found is None else found.numbers,
            attempts=list(self._attempts),
            assumptions=ASSUMPTIONS + ((LIBRARY,) if problem.slopes.smooth else ()),
            _problem=problem,
            _at=now.at,
            _checkpoints=self._checkpoints | {now.step: _without_values(self._checkpoints[now.step])},
        )

    def _moved(self) -> float:
        """Upper bound of the distance from the start to the computed point, in theta."""
        total = 0.0
        for part in self.problem.trained:
            here, start = self._now.at.parts()[part], self._origin.parts()[part]
            lows = norm_up(here.low) + norm_up(start.low)
            total = math.hypot(total, (norm_up(here.high - start.high) * (1 + 1e-12) + lows) / self.problem.scales[part])
        return up(total)

    def continue_from(self, old: Proof, step_size: str | float) -> None:
        """Takes over the steps of a proof of the same problem."""
        if old._problem is None or old._at is None or not self.problem.same(old._problem):
            raise InvalidArgument(
                "prove: `resume` is a proof about another network, another start or other data; "
                "pass the model with the activation, scales and parameters that it had at the start."
            )
        if not isinstance(step_size, str) and float(step_size) != old.step_size:
            raise InvalidArgument(
                f"prove: `resume` has step_size = {old.step_size!r}, got {step_size!r}; leave step_size out to continue."
            )
        columns = [item.name for item in fields(Row)]
        self._rows = [Row(*(old.steps[name][k] for name in columns)) for k in range(old.num_steps)]
        self._least = min((ratio for ratio in old.steps["mask_ratio"] if ratio is not None), default=None)
        self.eta = old.step_size
        self._attempts, self._before = list(old.attempts), old.seconds
        self._checkpoints = dict(old._checkpoints)
        while self._stride * 2 * _CHECKPOINTS < old.num_steps:
            self._stride *= 2
        self._below = _next_loss(self._attempts)
        self._now = _Now(old.num_steps, old._at, old.delta, *self._evaluated(old._at))
        self._keep()  # with the values of which the next step is made


def _without_values(kept: dict[str, Tensor]) -> dict[str, Tensor]:
    """A checkpoint from which no step is made: the parameters alone, of which all else follows."""
    return {name: value for name, value in kept.items() if name.removesuffix(".low") not in _VALUES}


def _next_loss(attempts: list[dict[str, Any]]) -> float:
    """Below which loss the tail is tried again."""
    if not attempts:
        return math.inf
    near = (attempts[-1].get("shortfall") or math.inf) < _NEAR
    return float((_FALL_NEAR if near else _FALL) * attempts[-1]["loss"])


def predicted_end(attempts: list[dict[str, Any]]) -> int | None:
    """The step where the tail may hold: the shortfall of the last attempts, extrapolated; a
    guess."""
    known = [(attempt["step"], attempt.get("shortfall")) for attempt in attempts[-4:]]
    points = [(step, math.log(value)) for step, value in known if value is not None and 0 < value < math.inf]
    if len(points) < 2 or not points[-1][1] < points[0][1]:
        return None
    (first, high), (last, low) = points[0], points[-1]
    return last + round(max(0.0, low) * (last - first) / (high - low))
