"""How far an evaluation is: told to a function, or shown as a bar if rich is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from wellposed.errors import InvalidType, MissingPackage, how_to_install

__all__ = ["Report", "reporting"]

#: Called with the points that are done and all that there are.
Report = Callable[[int, int], None]


@contextmanager
def reporting(progress: bool | Report, title: str) -> Iterator[Report]:
    """What to call after every point.

    Args:
        progress: A function, or whether to show a bar.
        title: Of the bar.
    """
    if progress is False:
        yield lambda done, total: None
        return
    if progress is not True:
        if not callable(progress):
            raise InvalidType(f"progress must be True, False or a function of (done, total); got {progress!r}.")
        yield progress
        return
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError as error:
        raise MissingPackage(f"progress=True needs rich; install it with: {how_to_install('cli')}.") from error
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
