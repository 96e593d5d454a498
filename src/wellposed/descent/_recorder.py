"""The books of a run: rows, callbacks, the progress bar, and the point to go back to."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from wellposed.descent._objective import AbstractObjective, Evaluation, trained_parameters
from wellposed.descent._progress import AbstractProgress
from wellposed.descent.callbacks import Callback, State
from wellposed.descent.history import History, Stop
from wellposed.errors import IllPosed, InvalidType, NotConverged

__all__ = ["Recorder", "Travelled", "check_callbacks", "say_where"]


@dataclass
class Travelled:
    """The way so far: by parameter, and of all together."""

    by_parameter: dict[str, float] = field(default_factory=dict)
    total: float = 0.0


class Recorder:
    """Keeps the history of a run.

    Args:
        objective: What is trained.
        history: Where rows go.
        callbacks: Called at every visit.
        stop_loss: The loss at which to stop, or None.
        progress: What is shown.
    """

    def __init__(
        self,
        objective: AbstractObjective,
        history: History,
        callbacks: tuple[Callback, ...],
        *,
        stop_loss: float | None,
        progress: AbstractProgress,
    ) -> None:
        self.objective, self.history, self.callbacks, self.stop_loss = objective, history, callbacks, stop_loss
        self.parameters = trained_parameters(objective.model)
        self._origin = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        self._progress = progress
        self._began = time.perf_counter()
        self._spent: dict[str, float | None] = {"equilibrium_steps": None, "adjoint_steps": None}
        self._last: tuple[Evaluation, Travelled, dict[str, Any]] | None = None
        self._status = ""

    def count(self, now: Evaluation) -> None:
        """Adds what an evaluation has cost; every one is to be counted once."""
        for name in self._spent:
            cost, before = getattr(now, name), self._spent[name]
            self._spent[name] = before if cost is None else cost + (before or 0.0)

    def visit(self, now: Evaluation, travelled: Travelled, where: dict[str, Any], *, last: bool, record: bool) -> Stop | None:
        """Records the point where the model is now, calls the callbacks, and says whether to stop.

        Args:
            now: The loss there, finite.
            travelled: The way from the start.
            where: "step", and "time" of a flow: the first entries of the row.
            last: Whether there is nothing to come.
            record: Whether a row is due; the last one always is.
        """
        stop = Stop.LOSS if self.stop_loss is not None and now.loss <= self.stop_loss else Stop.STEPS if last else None
        self._last = now, travelled, where
        step, at_time = where["step"], where.get("time")
        if record or stop is not None:
            self.flush()
        state = State(
            self.objective.model,
            self.objective.X,
            self.objective.y,
            step,
            at_time,
            now.loss,
            now.r,
            now.gradients,
            now.at,
            self.history,
            self._status,
        )
        # Every callback sees the point, whatever the others say.
        answers = [callback.on_step(state) for callback in self.callbacks]
        self._status = state.status
        self._progress.show(step, at_time, now, state.status)
        if stop is None and any(answer is True for answer in answers):
            stop = Stop.CALLBACK
            self.flush()
        return stop

    def flush(self) -> None:
        """Makes the last point visited a row, if it is none yet."""
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
        self.history.rows.append(row)  # one row at once: an interruption leaves no ragged columns
        self._last, self._spent = None, dict.fromkeys(self._spent)


def norm(tensor: Tensor) -> float:
    """Frobenius."""
    return float(torch.linalg.vector_norm(tensor.detach()))


@contextmanager
def say_where(place: str) -> Iterator[None]:
    """Errors of the policies of a model, which know nothing of the run, say where in it they were raised.

    Args:
        place: Such as "step 7 of descend".
    """
    try:
        yield
    except (IllPosed, NotConverged) as error:
        error.args = (f"{error} (At {place}.)", *error.args[1:])
        raise


def check_callbacks(callbacks: Iterable[Callback]) -> tuple[Callback, ...]:
    """The callbacks, each with an `on_step`."""
    found = tuple(callbacks) if isinstance(callbacks, Iterable) else (callbacks,)
    for callback in found:
        if isinstance(callback, type) or not isinstance(callback, Callback):
            raise InvalidType(f"A callback is an object with a method on_step(state); got {callback!r}.")
    return found
