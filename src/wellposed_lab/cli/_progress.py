"""How training goes: a bar on a terminal, a line now and then elsewhere; both on stderr."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from wellposed_lab.cli._app import say

__all__ = ["Watch", "watching"]

SECONDS_BETWEEN_LINES = 5.0


class Watch:
    """A `Listener` of `fit`.

    Args:
        epochs: Of the whole run.
        bar: Where to show it, or None for lines.
    """

    def __init__(self, epochs: int, bar: Progress | None) -> None:
        self._epochs, self._bar = epochs, bar
        self._task = None if bar is None else bar.add_task("training", total=float(epochs), text="")
        self._shown = time.monotonic()
        self._text = ""

    def on_batch(self, epoch: int, batch: int, batches: int, loss: float) -> None:
        """A step was taken."""
        self._show(epoch + batch / batches, f"batch loss {loss:.3g}{self._text}")

    def on_epoch(self, row: dict[str, Any]) -> None:
        """An epoch is over. What was measured at its end stays in sight, with its epoch: the parameters move on."""
        known = [("train_loss", "train loss"), ("validation_loss", "validation loss"), ("test_accuracy", "test accuracy")]
        parts = [f"{label} {row[name]:.4g}" for name, label in known if name in row]
        if "certified" in row:
            parts.append("certified" if row["certified"] else "not certified")
        if parts:
            self._text = f"; at epoch {row['epoch']}: {', '.join(parts)}"
        mean = f"mean batch loss {row['batch_loss']:.3g}" if "batch_loss" in row else "at the start"
        self._show(row["epoch"], f"{mean}{self._text}")

    def _show(self, done: float, text: str) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, text=text)
        elif time.monotonic() - self._shown > SECONDS_BETWEEN_LINES:
            self._shown = time.monotonic()
            say().print(f"epoch {done:.1f} of {self._epochs}: {text}", highlight=False)


@contextmanager
def watching(epochs: int, *, quiet: bool) -> Iterator[Watch | None]:
    """What watches a training run while the context is open."""
    console = say()
    if quiet:
        yield None
    elif not console.is_terminal:
        yield Watch(epochs, None)
    else:
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:.1f}/{task.total:.0f}"))
        with Progress(*columns, TextColumn("{task.fields[text]}"), TimeRemainingColumn(), console=console) as bar:
            yield Watch(epochs, bar)
