"""Files of records: thinned, read again, and the results that a later run takes from them.

A folder of records has two files for an experiment. `figure1.json` is the record: all its tasks are
measured and its claims are judged. `figure1.partial.json` exists while a run is not complete: the
results that the record does not have yet, whole, so that an interrupted run loses at most one task
even where only this folder is kept.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wellposed._reading import read_object
from wellposed.errors import InvalidArgument, RunError
from wellposed_lab.papers.claims import ClaimCheck, ClaimOutcome
from wellposed_lab.papers.experiment import AbstractExperiment, Result, Task
from wellposed_lab.papers.record import BYTES, Record, write
from wellposed_lab.papers.registry import EXPERIMENTS, find

__all__ = ["RecordFolder", "path_of", "same_task", "store", "stored", "thinned"]

#: Significant digits of numbers that are kept.
DIGITS = 5
#: Longer columns of numbers keep so many of their entries, the first and the last among them.
LONGEST = 512


def path_of(name: str, folder: Path) -> Path:
    """The file of an experiment."""
    return folder / f"{name}.json"


def thinned(record: Record) -> Record:
    """The record with rounded numbers and short columns, for a repository."""
    results = [dataclasses.replace(r, values=_thin(r.values), seconds=round(r.seconds, 1)) for r in record.results]
    return dataclasses.replace(record, results=results, panels=_thin(record.panels), seconds=round(record.seconds, 1))


def _thin(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _thin(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        parts = list(value)
        if len(parts) > LONGEST and all(isinstance(part, (int, float)) or part is None for part in parts):
            parts = [parts[round(i * (len(parts) - 1) / (LONGEST - 1))] for i in range(LONGEST)]
        return [_thin(part) for part in parts]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) and math.isfinite(value) else value


def store(record: Record, folder: Path) -> Path:
    """Writes the record; returns its file.

    A later run judges the results of this file again, together with its own. So the numbers are
    thinned only if the thinned ones give the same verdicts; otherwise all are kept as they are. No
    rule of an experiment reads a column that is longer than `LONGEST`: what a rule needs of every
    step, such as the number of steps that raised a loss, is a separate measurement.
    """
    path = path_of(record.experiment, folder)
    thin = thinned(record)
    chosen = thin if _outcomes(thin) == {check.claim.key: check.outcome for check in record.checks} else record
    write(path, chosen.to_json().encode() + b"\n")
    return path


def _outcomes(record: Record) -> dict[str, ClaimOutcome] | None:
    """The verdicts from what a file of this record would hold; None if that is not enough."""
    experiment, read = find(record.experiment), Record.from_json(record.to_json())
    try:
        checks: list[ClaimCheck] = experiment.checks(experiment.full.changed(read.config), read.results)
    except (TypeError, ValueError):  # a number that JSON does not have became None
        return None
    return {check.claim.key: check.outcome for check in checks}


def stored(name: str, folder: Path) -> Record:
    """The record of an experiment in a folder."""
    path = path_of(name, folder)
    if not path.is_file():
        known = [known for known in EXPERIMENTS if path_of(known, folder).is_file()]
        raise InvalidArgument(
            f"There is no record of {name} at {path}; there are {', '.join(known) or 'none'}. Name the folder `records` of the "
            "repository by --records."
        )
    return Record.from_json(path.read_text(encoding="utf-8"))


def same_task(task: Task) -> str:
    """Equal for equal tasks: a list is a tuple, as in JSON, and the order of the keys is free."""
    return json.dumps(task, sort_keys=True)


class RecordFolder:
    """A folder of records that grows over several runs, on one machine after the other.

    A result whose task is equal is taken from the folder by default, and not only on demand: what
    is stored took hours and is judged anew in any case, so to measure it again is what needs a
    word (`--fresh`). Results of other code are taken too, for otherwise no record would survive a
    change of the code. Each result has its `program` and `commit`, and the record counts them in
    its notes (`measured_by_others`).

    Args:
        folder: Made when the first result is kept.
        experiment: Whose.
    """

    def __init__(self, folder: Path, experiment: AbstractExperiment) -> None:
        self.folder, self.experiment = folder, experiment
        self._partial = folder / f"{experiment.name}.partial.json"

    def results(self) -> dict[str, Result]:
        """All that is stored, by task; those of experiments that share their tasks, too."""
        shared = self.experiment.tasks_of
        names = [e.name for e in EXPERIMENTS.values() if e.name == self.experiment.name or (shared and e.tasks_of == shared)]
        found = [
            result for name in names for result in (*self._of_record(name), *RecordFolder(self.folder, find(name)).begun())
        ]
        return {same_task(result.task): dataclasses.replace(result, cached=True) for result in found}

    def begun(self) -> list[Result]:
        """Results of a run that is not complete."""
        plain = read_object(self._partial, limit=BYTES, error=RunError) if self._partial.is_file() else None
        return [] if plain is None else [Result(**result) for result in plain["results"]]

    def refuse_loss(self, tasks: Sequence[Task]) -> None:
        """Raises if the record has results that a record of these tasks would not have."""
        asked = {same_task(task) for task in tasks}
        lost = [result.task for result in self._of_record(self.experiment.name) if same_task(result.task) not in asked]
        if lost:
            raise InvalidArgument(
                f"{path_of(self.experiment.name, self.folder)} has {len(lost)} results that this run does not ask for, such as "
                f"{lost[0]}; they would be lost. Ask for them too by --set, or name another folder by --records, or replace "
                "the record by --fresh."
            )

    def keep(self, result: Result) -> None:
        """Keeps a result of a run that is not complete."""
        self._write([*(r for r in self.begun() if same_task(r.task) != same_task(result.task)), result])

    def complete(self, record: Record) -> None:
        """Stores the record; what it has is no longer kept apart."""
        store(record, self.folder)
        done = {same_task(result.task) for result in record.results}
        self._write([result for result in self.begun() if same_task(result.task) not in done])

    def _of_record(self, name: str) -> list[Result]:
        return stored(name, self.folder).results if path_of(name, self.folder).is_file() else []

    def _write(self, results: Sequence[Result]) -> None:
        if results:
            plain = {"experiment": self.experiment.name, "results": [dict(vars(result)) for result in results]}
            write(self._partial, json.dumps(plain).encode() + b"\n")
        else:
            self._partial.unlink(missing_ok=True)
