"""reproduce: run an experiment of a paper, and say which of its claims hold."""

from __future__ import annotations

import io
import os
import platform
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from wellposed.errors import InvalidArgument, MissingPackage, WellposedWarning, did_you_mean
from wellposed.plot._figure import new_figure
from wellposed.plot.curves import experiment as picture_of
from wellposed_lab.papers._cache import TaskCache, program, write
from wellposed_lab.papers._config import Config
from wellposed_lab.papers._experiment import AbstractExperiment, Record, Result, Task
from wellposed_lab.papers._parallel import run_tasks
from wellposed_lab.papers.registry import find

__all__ = ["SIZES", "draw", "reproduce", "why_no_figure"]

SIZES = ("quick", "full")
#: Is told of every result: how many are done, how many there are, and the latest.
Listener = Callable[[int, int, Result | None], None]


def reproduce(
    name: str,
    size: str = "quick",
    changes: Mapping[str, Any] | None = None,
    *,
    out: str | os.PathLike[str] | None = None,
    jobs: int = 1,
    dask: str | None = None,
    fresh: bool = False,
    figure: bool = True,
    listener: Listener | None = None,
) -> Record:
    """Runs an experiment and judges the claims of its paper.

    Args:
        name: Such as "ling2022/figure1"; `EXPERIMENTS` has them all.
        size: "quick" (minutes) or "full" (the sizes of the paper).
        changes: Other values for keys of its configuration, such as {"widths": (50, 100)}.
        out: A folder. In `out/name` go one file a task (in `tasks`), `record.json` and `figure.png`; started again after
            an interruption, only what is missing is measured. None keeps nothing.
        jobs: Processes on this machine; -1 for one a core.
        dask: The address of a Dask scheduler to use instead.
        fresh: Measure everything again.
        figure: Whether to draw `figure.png`; without matplotlib a warning comes first, and everything else is done.
        listener: Called after every task with (done, total, its result), and once before with None.

    Returns:
        The record, with verdicts, numbers, configuration and every result.
    """
    experiment = find(name)
    if size not in SIZES:
        raise InvalidArgument(f"size must be 'quick' or 'full'; got {size!r}.{did_you_mean(str(size), SIZES)}")
    asked = (experiment.quick if size == "quick" else experiment.full).changed(changes or {})
    started = time.perf_counter()
    config, notes = experiment.available(asked)
    tasks = experiment.tasks(config)
    folder = None if out is None else Path(out).joinpath(*name.split("/"))
    missing = why_no_figure() if figure and folder is not None else None
    if missing is not None:
        warnings.warn(missing, WellposedWarning, stacklevel=2)
    results = _results(experiment, tasks, folder, fresh=fresh, jobs=jobs, dask=dask, listener=listener)
    record = Record(
        experiment=name,
        title=experiment.title,
        size=f"{size}, changed" if changes else size,
        config=config.to_dict(),
        checks=experiment.checks(config, results),
        results=results,
        panels=experiment.panels(config, results),
        notes=[*notes, *experiment.remarks(results), *_about_sizes(config, experiment), *experiment.departures],
        environment={"program": program(), "python": platform.python_version(), "machine": platform.machine()},
        seconds=time.perf_counter() - started,
    )
    if folder is not None:
        write(folder / "record.json", record.to_json().encode())
        if figure and missing is None:
            draw(record, folder / "figure.png")
    return record


def _about_sizes(config: Config, experiment: AbstractExperiment) -> list[str]:
    """Verdicts are about the sizes that were run."""
    full = experiment.full.to_dict()
    other = [f"{key} {full[key]}" for key, value in config.to_dict().items() if value != full[key]]
    return [f"the verdicts are about these sizes; --full has {', '.join(other)}"] if other else []


def why_no_figure() -> str | None:
    """Why no figure can be drawn here, and what to install; None if one can."""
    try:
        new_figure(1.0, 1.0)
    except MissingPackage as error:
        return f"No figure.png will be drawn: {error} Verdicts and numbers do not depend on it."
    return None


def draw(record: Record, path: Path) -> None:
    """The figure of a record, as a file."""
    content = io.BytesIO()
    picture_of(record).savefig(content, format="png", dpi=130)
    write(path, content.getvalue())


def _results(
    experiment: AbstractExperiment,
    tasks: list[Task],
    folder: Path | None,
    *,
    fresh: bool,
    jobs: int,
    dask: str | None,
    listener: Listener | None,
) -> list[Result]:
    """One for each task, in the order of the tasks; each is kept as soon as it is there."""
    cache = None if folder is None else TaskCache(folder / "tasks", experiment.name)
    found: list[Result | None] = [None if cache is None or fresh else cache.get(task) for task in tasks]
    done = sum(result is not None for result in found)
    if listener is not None:
        listener(done, len(tasks), None)
    missing = [task for task, result in zip(tasks, found, strict=True) if result is None]
    for result in run_tasks(experiment.name, missing, jobs=jobs, dask=dask):
        if cache is not None:
            cache.put(result)
        found[tasks.index(result.task)] = result
        done += 1
        if listener is not None:
            listener(done, len(tasks), result)
    return [result for result in found if result is not None]
