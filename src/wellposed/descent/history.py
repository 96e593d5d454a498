"""What a training run leaves behind."""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from wellposed.errors import InvalidArgument, did_you_mean

#: Columns with one number a row.
NUMBERS = (
    "step",
    "time",
    "integrator_steps",
    "loss",
    "residual_norm",
    "total_path_length",
    "equilibrium_steps",
    "adjoint_steps",
    "wall_time",
)
#: Those that only a flow has.
OF_FLOW = ("time", "integrator_steps")
#: Columns with one number a row and parameter.
BY_PARAMETER = ("gradient_norm", "distance", "path_length")


class Stop(enum.Enum):
    """Why a run ended; each member carries its explanation as `message`.

    Examples:
        >>> import torch, wellposed as wp
        >>> model, X = torch.nn.Linear(1, 1), torch.ones(1, 1)
        >>> history = wp.descend(model, X, X, step_size=0.1, steps=3)
        >>> history.stop, history.stop.message
        (<Stop.STEPS: 'steps'>, 'all steps were taken, or the last time was reached')
    """

    STEPS = "steps"
    LOSS = "loss"
    CALLBACK = "callback"
    NOT_FINITE = "not_finite"
    DIVERGED = "diverged"
    INTERRUPTED = "interrupted"
    ERROR = "error"

    @property
    def message(self) -> str:
        """What this means, in one sentence."""
        return _MESSAGES[self]


_MESSAGES = {
    Stop.STEPS: "all steps were taken, or the last time was reached",
    Stop.LOSS: "the loss fell to stop_loss",
    Stop.CALLBACK: "a callback asked for it",
    Stop.NOT_FINITE: "the loss became NaN or infinite; the parameters are the last ones with a finite loss",
    Stop.DIVERGED: "the loss grew without bound; the parameters are the last ones before it passed the limit",
    Stop.INTERRUPTED: "it was interrupted; the parameters are those of the last row",
    Stop.ERROR: "an error was raised; the parameters are those of the last row",
}


@dataclass(frozen=True)
class Event:
    """Something a callback recorded.

    Attributes:
        step, time: When; `time` is None in a descent.
        value: What. After a round trip through JSON it is what `value.to_dict()` gave.
    """

    step: int
    time: float | None
    value: Any


@dataclass(eq=False)
class History:
    """The rows of a run, in order: `history["loss"]` is a column, (rows,) in float64.

    | column | a row of it |
    | --- | --- |
    | step | steps of descent taken; for a flow the number of the row |
    | time, integrator_steps | of a flow only: the time, and accepted steps so far |
    | loss, residual_norm | the sum over samples r^2/2, and its |r| |
    | total_path_length | the path length of all parameters together |
    | equilibrium_steps, adjoint_steps | mean evaluations a sample since the row before; or NaN |
    | wall_time | seconds since the start |
    | gradient_norm | by parameter: Frobenius norm of the gradient of the loss |
    | distance | by parameter: |theta - theta_0|_F |
    | path_length | by parameter: at least the distance |

    The last three are dictionaries of columns, `history["distance"]["W"]`.

    Attributes:
        kind: "descent" or "flow".
        speeds: By parameter: the step sizes of a descent, the rates of a flow.
        rows: One dictionary each, plain Python.
        events: By name, what callbacks recorded.
        stop: Why it ended; None while it runs.
        certificate: `to_dict()` of the certificate that chose the step sizes, or None.

    Examples:
        >>> import torch, wellposed as wp
        >>> model = wp.GaussianDEQ(4, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        >>> X, y = torch.eye(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
        >>> history = wp.descend(model, X, y, step_size=1e-2, steps=10)
        >>> len(history["loss"]), list(history["distance"]), history.stop
        (11, ['W', 'U', 'a'], <Stop.STEPS: 'steps'>)
    """

    kind: str
    speeds: dict[str, float]
    rows: list[dict[str, Any]] = field(default_factory=list)
    events: dict[str, list[Event]] = field(default_factory=dict)
    stop: Stop | None = None
    certificate: dict[str, Any] | None = None

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns."""
        return tuple(name for name in NUMBERS if name not in OF_FLOW or self.kind == "flow") + BY_PARAMETER

    def __getitem__(self, column: str) -> Any:
        if column not in self.columns:
            hint = did_you_mean(str(column), self.columns)
            raise InvalidArgument(
                f"A history of a {self.kind} has no column {column!r}; it has {', '.join(self.columns)}.{hint}"
            )
        if column in BY_PARAMETER:
            return {name: _tensor(row[column][name] for row in self.rows) for name in self.speeds}
        return _tensor(row[column] for row in self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def loss(self) -> Tensor:
        """(rows,) |r|^2/2."""
        column: Tensor = self["loss"]
        return column

    @property
    def residual_norm(self) -> Tensor:
        """(rows,) |r|."""
        column: Tensor = self["residual_norm"]
        return column

    def total(self, column: str) -> Tensor:
        """(rows,) the Euclidean norm of all parameters together.

        Args:
            column: "gradient_norm" or "distance"; path lengths do not add up like this, see
                "total_path_length".
        """
        if column not in ("gradient_norm", "distance"):
            raise InvalidArgument(f"total needs 'gradient_norm' or 'distance'; got {column!r}.")
        return torch.linalg.vector_norm(torch.stack(list(self[column].values())), dim=0)

    def measured_rate(self) -> Tensor:
        r"""(rows - 1,) how fast |r| fell from row to row, comparable with `Certificate.rate`.

        Descent: the factor a step, (|r_k|/|r_j|)^(1/(k - j)). Flow: -log(|r(t)|/|r(s)|)/(t - s).
        """
        e = self.residual_norm
        if self.kind == "flow":
            return -torch.log(e[1:] / e[:-1]) / self["time"].diff()
        return (e[1:] / e[:-1]) ** (1.0 / self["step"].diff())

    def certified_residual(self, rate: float | None = None) -> Tensor:
        """(rows,) what a rate promises: |r_0| rate^k for a descent, |r_0| exp(-rate t) for a flow.

        Args:
            rate: Of a certificate at the start of this run; that of `certificate` if not given.
        """
        if rate is None:
            rate = None if self.certificate is None else self.certificate["rate"]
            if rate is None:
                raise InvalidArgument("This run had no certificate with a rate: give rate=, e.g. wp.certify(...).rate.")
        first = self.residual_norm[:1]
        return first * torch.exp(-rate * self["time"]) if self.kind == "flow" else first * rate ** self["step"]

    def add_event(self, name: str, value: Any, *, step: int, time: float | None) -> None:
        """Appends to `events[name]`; callbacks use `State.record`, which knows step and time."""
        self.events.setdefault(name, []).append(Event(step, time, value))

    def as_numpy(self) -> dict[str, np.ndarray]:
        """All columns as arrays; those by parameter are named "distance.W"."""
        arrays: dict[str, np.ndarray] = {}
        for name in self.columns:
            column = self[name]
            parts = {f"{name}.{key}": part for key, part in column.items()} if isinstance(column, dict) else {name: column}
            arrays |= {key: part.numpy() for key, part in parts.items()}
        return arrays

    def to_dict(self) -> dict[str, Any]:
        """Plain Python that JSON can write; infinities and NaN become strings."""
        events = {
            name: [{"step": event.step, "time": event.time, "value": _plain(event.value)} for event in found]
            for name, found in self.events.items()
        }
        return {
            "kind": self.kind,
            "speeds": _plain(self.speeds),
            "rows": _plain(self.rows),
            "events": events,
            "stop": None if self.stop is None else self.stop.value,
            "certificate": _plain(self.certificate),
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> History:
        """The history that `to_dict` wrote."""
        known = ("kind", "speeds", "rows", "events", "stop", "certificate")
        if wrong := set(known) ^ set(plain):
            raise InvalidArgument(f"This is not a history: fields {sorted(wrong)} are missing or unknown.")
        rows = [{name: _numbers(value) for name, value in row.items()} for row in plain["rows"]]
        events = {name: [Event(**event) for event in found] for name, found in plain["events"].items()}
        stop = None if plain["stop"] is None else Stop(plain["stop"])
        return cls(plain["kind"], _numbers(plain["speeds"]), rows, events, stop, plain["certificate"])

    def to_json(self) -> str:
        """`to_dict` as text."""
        return json.dumps(self.to_dict(), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> History:
        """The history that `to_json` wrote."""
        return cls.from_dict(json.loads(text))

    def __repr__(self) -> str:
        if not self.rows:
            return f"History({self.kind}, no rows)"
        first, last = self.rows[0], self.rows[-1]
        where = f"time {last['time']:.4g}, " if self.kind == "flow" else ""
        why = "running" if self.stop is None else f"stopped: {self.stop.value}"
        return (
            f"History({self.kind}, {len(self.rows)} rows to {where}step {last['step']}, loss {first['loss']:.4g} -> "
            f"{last['loss']:.4g}, {last['wall_time']:.2f} s, {why})"
        )


def _tensor(numbers: Iterable[float | None]) -> Tensor:
    return torch.tensor([math.nan if number is None else number for number in numbers], dtype=torch.float64)


def _plain(value: Any) -> Any:
    """For JSON: objects by their `to_dict()`, numbers that it does not know as text."""
    if hasattr(value, "to_dict"):
        value = value.to_dict()
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _numbers(value: Any) -> Any:
    """Back from `_plain`, where only numbers are expected."""
    if isinstance(value, dict):
        return {key: _numbers(part) for key, part in value.items()}
    return float(value) if isinstance(value, str) else value
