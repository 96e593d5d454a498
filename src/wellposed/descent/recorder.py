"""The record of a run: what callbacks get, and the rows of the history."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from wellposed._progress import ProgressDisplay
from wellposed.descent._objective import AbstractObjective, Evaluation
from wellposed.descent.history import History, Stop
from wellposed.errors import IllPosed, InvalidType, NotConverged
from wellposed.kernel._method import trained_parameters
from wellposed.nn.layer import Linearised

#: Of the progress display.
PROGRESS_LINE = "{title} {done:g}/{total:g}: {text}"


@dataclass
class State:
    """The present point of a run. A callback must not change the parameters of `model`.

    Attributes:
        model, X, y: The problem.
        step: Steps of descent taken; for a flow the number of the row.
        time: Of a flow; None in a descent.
        loss, r: |r|^2/2, and y_hat - y of the shape of y.
        gradients: Of the loss, by parameter.
        point: Equilibria and masked adjoints (`Linearised`) of a theory network; None for other
            models. It is free, while `model.linearise(X)` would solve again.
        history: The rows so far.
        status: A few words for the progress bar, e.g. "certified"; they stay until changed.

    Examples:
        >>> import torch, wellposed as wp
        >>> class Watch:
        ...     def on_step(self, state):
        ...         state.record("bias gradient", state.gradients["bias"].item())
        >>> model, X = torch.nn.Linear(1, 1), torch.ones(1, 1)
        >>> history = wp.descend(model, X, X, step_size=0.1, steps=3, callbacks=[Watch()])
        >>> len(history.events["bias gradient"])
        4
    """

    model: nn.Module
    X: Any
    y: Tensor
    step: int
    time: float | None
    loss: float
    r: Tensor
    gradients: dict[str, Tensor]
    point: Linearised | None
    history: History
    status: str = ""

    def record(self, name: str, value: Any) -> None:
        """Adds an event to `history.events[name]`, with the present step and time.

        Args:
            name: Of the list of events.
            value: Plain Python, or an object with `to_dict()`, so that JSON can write the history.
        """
        self.history.add_event(name, value, step=self.step, time=self.time)


@runtime_checkable
class Callback(Protocol):
    """Any object with this method.

    Examples:
        >>> import torch, wellposed as wp
        >>> class Below:
        ...     def on_step(self, state):
        ...         return state.loss < 0.1
        >>> model, X = torch.nn.Linear(1, 1), torch.ones(1, 1)
        >>> wp.descend(model, X, 5 * X, step_size=0.1, steps=100, callbacks=[Below()]).stop
        <Stop.CALLBACK: 'callback'>
    """

    def on_step(self, state: State) -> bool | None:
        """Called after every evaluation, the first at the start; True stops the training."""


@dataclass
class Travelled:
    """Path lengths so far: by parameter, and of all parameters together."""

    by_parameter: dict[str, float] = field(default_factory=dict)
    total: float = 0.0


class Recorder:
    """Keeps the history of a run, calls the callbacks and shows the progress."""

    def __init__(
        self,
        objective: AbstractObjective,
        history: History,
        callbacks: tuple[Callback, ...],
        *,
        stop_loss: float | None,
        progress: ProgressDisplay,
    ) -> None:
        self.objective, self.history, self.callbacks, self.stop_loss = objective, history, callbacks, stop_loss
        self.parameters = trained_parameters(objective.model)
        self._origin = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        self._progress, self._status = progress, ""
        self._began = time.perf_counter()
        self._spent: dict[str, float | None] = {"equilibrium_steps": None, "adjoint_steps": None}
        self._last: tuple[Evaluation, Travelled, dict[str, Any]] | None = None

    def count(self, now: Evaluation) -> None:
        """Adds the cost of an evaluation; each evaluation is counted once."""
        for name in self._spent:
            cost, before = getattr(now, name), self._spent[name]
            self._spent[name] = before if cost is None else cost + (before or 0.0)

    def visit(self, now: Evaluation, travelled: Travelled, where: dict[str, Any], *, last: bool, record: bool) -> Stop | None:
        """Records the present point, calls the callbacks, and returns why to stop, if at all.

        Args:
            now: The evaluation there, with a finite loss.
            travelled: Path lengths from the start.
            where: "step", and "time" of a flow: the first entries of the row.
            last: Whether the run ends here.
            record: Whether this point gets a row; the last one always does.
        """
        stop = Stop.LOSS if self.stop_loss is not None and now.loss <= self.stop_loss else Stop.STEPS if last else None
        self._last = now, travelled, where
        step, time_ = where["step"], where.get("time")
        if record or stop is not None:
            self.flush()
        problem = self.objective
        state = State(
            problem.model,
            problem.X,
            problem.y,
            step,
            time_,
            now.loss,
            now.r,
            now.gradients,
            now.point,
            self.history,
            self._status,
        )
        answers = [callback.on_step(state) for callback in self.callbacks]  # all of them, whatever one returns
        self._status = state.status
        self._progress.update(float(step) if time_ is None else time_, lambda: self._text(step, now))
        if stop is None and any(answer is True for answer in answers):
            stop = Stop.CALLBACK
            self.flush()
        return stop

    def _text(self, step: int, now: Evaluation) -> str:
        speed = step / max(time.perf_counter() - self._began, 1e-9)
        solves = {"equilibrium": now.equilibrium_steps, "adjoint": now.adjoint_steps}
        parts = [f"loss {now.loss:.3e}", f"{speed:.1f} steps/s"]
        parts += [f"{name} {steps:.1f}" for name, steps in solves.items() if steps is not None]
        return ", ".join([*parts, *filter(None, [self._status])])

    def flush(self) -> None:
        """Appends the row of the last visited point, unless it has one."""
        if self._last is None:
            return
        now, travelled, where = self._last
        row = where | {
            "loss": now.loss,
            "residual_norm": math.sqrt(2 * now.loss),
            "total_path_length": travelled.total,
            **self._spent,
            "wall_time": time.perf_counter() - self._began,
            "gradient_norm": {name: norm(gradient) for name, gradient in now.gradients.items()},
            "distance": {name: norm(parameter - self._origin[name]) for name, parameter in self.parameters.items()},
            "path_length": dict(travelled.by_parameter),
        }
        self.history.rows.append(row)  # as a whole, so that an interruption leaves complete rows
        self._last, self._spent = None, dict.fromkeys(self._spent)


def norm(tensor: Tensor) -> float:
    """The Frobenius norm."""
    return float(torch.linalg.vector_norm(tensor.detach()))


@contextmanager
def with_location(place: str) -> Iterator[None]:
    """Adds the place in the run, such as "step 7 of descend", to errors that the model raises."""
    try:
        yield
    except (IllPosed, NotConverged) as error:
        error.args = (f"{error} (At {place}.)", *error.args[1:])
        raise


def check_callbacks(callbacks: Any) -> tuple[Any, ...]:
    """The callbacks, each with an `on_step`."""
    found = tuple(callbacks) if isinstance(callbacks, Iterable) else (callbacks,)
    for callback in found:
        if isinstance(callback, type) or not isinstance(callback, Callback):
            raise InvalidType(f"A callback is an object with a method on_step(state); got {callback!r}.")
    return found
