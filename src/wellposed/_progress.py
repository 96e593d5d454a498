"""Progress on stderr: a bar on a terminal if rich is installed, else a line now and then; and one
line about a single computation that takes long."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["ProgressDisplay", "announced", "progress_display"]

SECONDS_BETWEEN_LINES = 5.0
SECONDS_BETWEEN_UPDATES = 0.1
#: A computation that takes longer says what it is.
SECONDS_OF_SILENCE = 2.0
#: Products of two numbers that take well below that on any processor.
LITTLE_WORK = 1e8


class ProgressDisplay:
    """Shows how much work is done, at most every few seconds.

    Args:
        total: All of the work; None if it is not known yet.
        seconds: Least time between two displays.
        show: Called with done, total and a text.
        ends: Whether the end of the work is always shown.
    """

    def __init__(
        self, total: float | None, seconds: float, show: Callable[[float, float | None, str], None], *, ends: bool = True
    ) -> None:
        self._total, self._seconds, self._show, self._ends = total, seconds, show, ends
        self._done, self._last = 0.0, time.monotonic()

    def update(self, done: float, text: str | Callable[[], str] = "", *, total: float | None = None) -> None:
        """May be called often; a function `text` is called only when something is shown."""
        self._done, self._total = done, self._total if total is None else total
        at_end = self._ends and self._total is not None and done >= self._total
        now = time.monotonic()
        if at_end or now - self._last > self._seconds:
            self._last = now
            self._show(done, self._total, text() if callable(text) else text)

    def advance(self, amount: float) -> None:
        """Adds to the work done."""
        self.update(self._done + amount)


@contextmanager
def progress_display(
    title: str,
    total: float | None = None,
    *,
    show: bool = True,
    line: str = "{title}: {done:g} of {total:g}",
    bar: str | None = "{text}",
    heading: str = "",
    ends: bool = True,
) -> Iterator[ProgressDisplay]:
    """The display of some work while the context is open.

    Args:
        title: Beside the bar.
        total: All of the work; None if `update` gives it later.
        show: Whether to show anything.
        line: Format of a line, with title, done, total, percent and text.
        bar: Format of the text beside the bar, with done, total and text; None shows the text
            alone, for work whose end is not known.
        heading: Written once, above the first line.
        ends: Whether the end of the work is always shown in a line.
    """

    above = [heading] if heading else []

    def write(done: float, total: float | None, text: str) -> None:
        while above:
            print(above.pop(), file=sys.stderr, flush=True)
        percent = int(100 * done / total) if total else 0
        print(line.format(title=title, done=done, total=total or 0, percent=percent, text=text), file=sys.stderr, flush=True)

    if not show:
        yield ProgressDisplay(total, float("inf"), lambda *_: None)
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        yield ProgressDisplay(total, SECONDS_BETWEEN_LINES, write, ends=ends)
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        yield ProgressDisplay(total, SECONDS_BETWEEN_LINES, write, ends=ends)
        return
    beside = TextColumn("{task.fields[text]}", markup=False)
    columns = (beside,) if bar is None else (TextColumn(title), BarColumn(), beside, TimeRemainingColumn())
    with Progress(*columns, console=console) as rich_bar:
        task = rich_bar.add_task(title, total=total, text="")

        def draw(done: float, total: float | None, text: str) -> None:
            while above:
                console.print(above.pop(), markup=False, highlight=False)
            shown = text if bar is None else bar.format(done=done, total=total or 0, text=text)
            rich_bar.update(task, completed=done, total=total, text=shown)

        yield ProgressDisplay(total, SECONDS_BETWEEN_UPDATES, draw)


@contextmanager
def announced(text: str, work: float = float("inf")) -> Iterator[None]:
    """Writes one line to stderr if the context stays open for more than 2 seconds.

    A factorization cannot report how far it is, so a thread of its own waits for the time to pass.
    `WELLPOSED_QUIET=1` in the environment switches this off.

    Args:
        text: What is being done.
        work: About how many products of two numbers that takes; little work is not watched.
    """
    if work < LITTLE_WORK or os.environ.get("WELLPOSED_QUIET", "0") not in ("", "0"):
        yield
        return
    timer = threading.Timer(SECONDS_OF_SILENCE, lambda: print(f"wellposed: {text} ...", file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
