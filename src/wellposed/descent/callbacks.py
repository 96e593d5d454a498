"""What is called along the way, and what it is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import Tensor, nn

from wellposed.nn import Linearised

if TYPE_CHECKING:
    from wellposed.descent.history import History

__all__ = ["Callback", "State"]


@dataclass
class State:
    """Where the training is. The parameters of `model` are those of this very point, and must not be changed.

    Attributes:
        model, X, y: The problem.
        step: Steps of descent taken; of a flow the number of the row.
        time: Of a flow; None in a descent.
        loss: |r|^2/2.
        r: y_hat - y, of the shape of y.
        gradients: By parameter, those of the loss.
        at: Equilibria and masked adjoints (`Linearised`) of a theory network; None for other models. Using it costs nothing,
            while `model.linearise(X)` would solve again.
        history: The rows so far.
        status: A few words for the progress bar, e.g. "certified"; they stay until changed.
    """

    model: nn.Module
    X: Any
    y: Tensor
    step: int
    time: float | None
    loss: float
    r: Tensor
    gradients: dict[str, Tensor]
    at: Linearised | None
    history: History
    status: str = ""

    def record(self, name: str, value: Any) -> None:
        """Adds an event to the history: `history.events[name]`, with the present step and time.

        Args:
            name: Of the column.
            value: Plain Python, or an object with `to_dict()`, so that the history can be written as JSON.
        """
        self.history.add_event(name, value, step=self.step, time=self.time)


@runtime_checkable
class Callback(Protocol):
    """Any object with this method."""

    def on_step(self, state: State) -> bool | None:
        """Looks at the state after every evaluation, that at the start included; True stops the training."""
