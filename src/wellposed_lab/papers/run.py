"""Run an experiment in one process, in several, or on a Dask cluster; judge its claims."""

from __future__ import annotations

import functools
import os
import platform
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from wellposed.errors import InvalidArgument, MissingPackage, RunError, WellposedWarning, did_you_mean
from wellposed.plot._figure import new_figure
from wellposed.plot._files import rendered
from wellposed.plot.curves import experiment as picture_of
from wellposed_lab.papers.claims import ClaimCheck
from wellposed_lab.papers.experiment import AbstractExperiment, ExperimentConfig, Result, Task
from wellposed_lab.papers.record import Record, TaskCache, measured_by_others, program, write
from wellposed_lab.papers.registry import find
from wellposed_lab.papers.storage import RecordFolder, same_task
from wellposed_lab.runs.parallel import unordered
from wellposed_lab.runs.processes import git_head, on_threads

__all__ = ["about_sizes", "environment", "execute", "prepare", "reproduce", "run_tasks", "why_no_figure"]

SIZES = ("quick", "full")
#: Called after every result with the number done, the total, and the result.
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
    records: str | os.PathLike[str] | None = None,
    figure: bool = True,
    listener: Listener | None = None,
) -> Record:
    """Runs an experiment and judges the claims of its paper.

    Args:
        name: For example "ling2022/figure1"; `EXPERIMENTS` has them all.
        size: "quick" (minutes) or "full" (the sizes of the paper).
        changes: Other values for keys of its configuration, for example {"widths": (50, 100)}.
        out: A folder. `out/name` receives one file per task (in `tasks`), `record.json` and
            `figure.png` (.pdf, .svg); started again after an interruption, only what is missing is
            measured.
            None keeps nothing.
        jobs: Processes on this machine; -1 for one per core.
        dask: The address of a Dask scheduler to use instead.
        fresh: Measure everything again.
        records: A folder of records, such as `records` of the repository. Results of equal tasks
            are taken from it, by whichever code they were measured; each new one is kept there at
            once, and in the end the record, which judges all of them.
        figure: Whether to draw `figure.png`; without matplotlib a warning comes first, and
            everything else is done.
        listener: Called after every task with (done, total, its result), and once before with None.

    Returns:
        The record, with verdicts, numbers, configuration and every result.
    """
    experiment, started = find(name), time.perf_counter()
    config, notes, tasks = prepare(name, size, changes, records=records, fresh=fresh)
    folder, kept = (None if out is None else Path(out, *key.split("/")) for key in (name, experiment.tasks_of or name))
    missing = why_no_figure() if figure and folder is not None else None
    if missing is not None:
        warnings.warn(missing, WellposedWarning, stacklevel=2)
    cache = None if kept is None else TaskCache(kept / "tasks", experiment.tasks_of or name)
    record_folder = None if records is None else RecordFolder(Path(records), experiment)
    results = _results(name, tasks, (cache, record_folder), fresh=fresh, jobs=jobs, dask=dask, listener=listener)
    record = Record(
        experiment=name,
        title=experiment.title,
        size=f"{size}, changed" if changes else size,
        config=config.to_dict(),
        checks=_checks(experiment, config, results),
        results=results,
        panels=experiment.panels(config, results),
        notes=[*experiment.remarks(results), *measured_by_others(results)],
        departures=[*notes, *about_sizes(config, experiment), *experiment.departures],
        environment=environment(),
        seconds=time.perf_counter() - started,
    )
    if folder is not None:
        write(folder / "record.json", record.to_json().encode())
        if figure and missing is None:
            for ending, content in rendered(picture_of(record), dpi=130).items():
                write(folder / f"figure{ending}", content)
    if record_folder is not None:
        record_folder.complete(record)
    return record


def prepare(
    name: str,
    size: str = "quick",
    changes: Mapping[str, Any] | None = None,
    *,
    records: str | os.PathLike[str] | None = None,
    fresh: bool = False,
) -> tuple[ExperimentConfig, list[str], list[Task]]:
    """What an experiment would run: its configuration with the data that are available, a sentence
    for each replacement, and its tasks.

    Raises on every mistake that can be known before the first task: names, values, data files, and
    a stored record that would be lost. Arguments as in `reproduce`.
    """
    experiment = find(name)
    if size not in SIZES:
        raise InvalidArgument(f"size must be 'quick' or 'full'; got {size!r}.{did_you_mean(str(size), SIZES)}")
    asked = (experiment.quick if size == "quick" else experiment.full).changed(changes or {})
    config, notes = experiment.available(asked)
    tasks = experiment.tasks(config)
    if records is not None and not fresh:
        RecordFolder(Path(records), experiment).refuse_loss(tasks)
    return config, notes, tasks


def _checks(experiment: AbstractExperiment, config: ExperimentConfig, results: Sequence[Result]) -> list[ClaimCheck]:
    """The verdicts; results of older code may lack a measurement that the rules need."""
    try:
        return experiment.checks(config, results)
    except (KeyError, TypeError) as error:
        if not any(result.cached for result in results):
            raise
        raise RunError(
            f"The rules of {experiment.name} cannot judge the results that were measured before ({error!r}): other code may "
            "have measured other things. Measure all of them again by --fresh."
        ) from error


def environment() -> dict[str, Any]:
    """Of the code that judges: versions, machine and commit."""
    return {
        "program": program(),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "commit": _commit(),
    }


@functools.cache
def _commit() -> str | None:
    return git_head(Path(__file__).parent)


def about_sizes(config: ExperimentConfig, experiment: AbstractExperiment) -> list[str]:
    """Verdicts are about the sizes that were run."""
    full, own = experiment.full.to_dict(), config.to_dict()
    here, there = (", ".join(f"{key} {sizes[key]}" for key in own if own[key] != full[key]) for sizes in (own, full))
    return [f"the verdicts are about these sizes: {here}; --full has {there}"] if here else []


def why_no_figure() -> str | None:
    """Why no figure can be drawn here, and what to install; None if one can."""
    try:
        new_figure(1.0, 1.0)
    except MissingPackage as error:
        return f"No figure.png will be drawn: {error} Verdicts and numbers do not depend on it."
    return None


def _results(
    name: str,
    tasks: list[Task],
    stores: tuple[TaskCache | None, RecordFolder | None],
    *,
    fresh: bool,
    jobs: int,
    dask: str | None,
    listener: Listener | None,
) -> list[Result]:
    """One for each task, in the order of the tasks; each is kept as soon as it is there."""
    cache, records = stores
    known = {} if records is None or fresh else records.results()
    own = [None if cache is None or fresh else cache.get(task) for task in tasks]
    found: list[Result | None] = [result or known.get(same_task(task)) for task, result in zip(tasks, own, strict=True)]
    done = sum(result is not None for result in found)
    if listener is not None:
        listener(done, len(tasks), None)
    missing = [task for task, result in zip(tasks, found, strict=True) if result is None]
    for result in run_tasks(name, missing, jobs=jobs, dask=dask):
        for place in (cache.put if cache else None, records.keep if records else None):
            if place is not None:
                place(result)
        found[tasks.index(result.task)] = result
        done += 1
        if listener is not None:
            listener(done, len(tasks), result)
    return [result for result in found if result is not None]


def execute(experiment: str, task: Task) -> Result:
    """One task, on one thread, so that its numbers do not depend on how many run beside it."""
    started = time.process_time()
    with on_threads(1):
        values = find(experiment).run(task)
    return Result(task, values, time.process_time() - started, program=program(), commit=_commit())


def run_tasks(experiment: str, tasks: Sequence[Task], *, jobs: int = 1, dask: str | None = None) -> Iterator[Result]:
    """The results, each as soon as it is there, in any order.

    Args:
        experiment: Its name; processes look it up themselves.
        tasks: What is to be done.
        jobs: Processes on this machine; -1 for one per core. 1 needs no joblib.
        dask: The address of a scheduler, for example "tcp://127.0.0.1:8786"; its workers need the
            same packages and data.
    """
    yield from unordered(functools.partial(execute, experiment), tasks, jobs=jobs, dask=dask)
