"""What minibatch training is given, tells, and ends with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from wellposed.certify import Certificate
from wellposed_lab.runs.checkpoint import Progress

__all__ = ["STOPS", "Listener", "Outcome", "Parts"]

#: Why a run ended, in words.
STOPS = {
    "epochs": "all epochs are done",
    "patience": "the validation loss did not get better",
    "stop_loss": "the training loss is small enough",
    "not_finite": "the loss became NaN or infinite; the parameters are those before",
    "interrupted": "it was interrupted",
}


@dataclass(frozen=True)
class Parts:
    """Inputs and targets by part: "train", and if there are such "validation" and "test"."""

    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor] | None = None
    test: tuple[Tensor, Tensor] | None = None

    def items(self) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
        """Those that there are."""
        for name in ("train", "validation", "test"):
            if (part := getattr(self, name)) is not None:
                yield name, part


class Listener(Protocol):
    """Is told how it goes."""

    def on_batch(self, epoch: int, batch: int, batches: int, loss: float) -> None: ...

    def on_epoch(self, row: dict[str, Any]) -> None: ...


@dataclass
class Outcome:
    """What training ended with.

    Attributes:
        stop: A key of `STOPS`.
        progress: Where it ended.
        rows: Of this session.
        certificate: The last one, or None.
    """

    stop: str
    progress: Progress
    rows: list[dict[str, Any]] = field(default_factory=list)
    certificate: Certificate | None = None
