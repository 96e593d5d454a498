"""How far the work is: a bar if rich is installed, else a line to stderr now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SECONDS_BETWEEN_LINES = 5.0


@contextmanager
def progress_bar(title: str, total: int, *, show: bool) -> Iterator[Callable[[int], None]]:
    """A function to call with each amount of work done; `total` is all of it."""
    if not show:
        yield lambda amount: None
        return
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        yield _lines(title, total)
        return
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=total)
        yield lambda amount: bar.update(task, advance=amount)


def _lines(title: str, total: int) -> Callable[[int], None]:
    done, last = 0, time.monotonic()

    def advance(amount: int) -> None:
        nonlocal done, last
        done += amount
        now = time.monotonic()
        if done >= total or now - last > _SECONDS_BETWEEN_LINES:
            last = now
            print(f"{title}: {100 * done // total} %", file=sys.stderr, flush=True)

    return advance
