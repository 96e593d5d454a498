"""How the training goes: a bar if rich is installed, else a line to stderr now and then."""

from __future__ import annotations

import abc
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from wellposed.descent._objective import Evaluation

__all__ = ["AbstractProgress", "progress_of"]

SECONDS_BETWEEN_LINES = 5.0
SECONDS_BETWEEN_UPDATES = 0.1


class AbstractProgress(abc.ABC):
    """Shows the state of a run."""

    @abc.abstractmethod
    def show(self, step: int, at_time: float | None, now: Evaluation, status: str) -> None:
        """Tells where the run is; may be called as often as one likes."""


class Silent(AbstractProgress):
    def show(self, step: int, at_time: float | None, now: Evaluation, status: str) -> None:
        return None


class Lines(AbstractProgress):
    """A line now and then; `Bar` replaces what happens to it."""

    between = SECONDS_BETWEEN_LINES

    def __init__(self, title: str, total: float) -> None:
        self._title, self._total = title, total
        self._began = self._shown = time.monotonic()

    def show(self, step: int, at_time: float | None, now: Evaluation, status: str) -> None:
        moment = time.monotonic()
        done = float(step) if at_time is None else at_time
        if moment - self._shown < self.between and done < self._total:
            return
        self._shown = moment
        parts = [f"loss {now.loss:.3e}", f"{step / max(moment - self._began, 1e-9):.1f} steps/s"]
        if now.equilibrium_steps is not None:
            parts.append(f"equilibrium {now.equilibrium_steps:.1f}")
        if now.adjoint_steps is not None:
            parts.append(f"adjoint {now.adjoint_steps:.1f}")
        self._write(done, ", ".join([*parts, *filter(None, [status])]))

    def _write(self, done: float, text: str) -> None:
        print(f"{self._title} {done:g}/{self._total:g}: {text}", file=sys.stderr, flush=True)


class Bar(Lines):
    between = SECONDS_BETWEEN_UPDATES

    def __init__(self, title: str, total: float, bar: Any) -> None:
        super().__init__(title, total)
        self._bar, self._task = bar, bar.add_task(title, total=total, text="")

    def _write(self, done: float, text: str) -> None:
        self._bar.update(self._task, completed=done, text=text)


@contextmanager
def progress_of(title: str, total: float, *, show: bool) -> Iterator[AbstractProgress]:
    """What shows the run while the context is open.

    Args:
        title: Of the run.
        total: The last step, or the last time.
        show: Whether to show anything.
    """
    if not show:
        yield Silent()
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        yield Lines(title, total)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        yield Bar(title, total, bar)
