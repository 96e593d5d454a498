"""The records in the repository: thinned, read again, compared with a part that is run anew.

`python -m wellposed_lab.papers.records reproduced records` judges the runs of a folder (`--out`) by
the present rules, and stores them.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wellposed.errors import InvalidArgument
from wellposed_lab.papers.experiment import Task
from wellposed_lab.papers.record import Record, write
from wellposed_lab.papers.registry import EXPERIMENTS, find
from wellposed_lab.papers.run import about_sizes, execute

__all__ = ["Comparison", "collect", "compare", "judged_anew", "path_of", "store", "stored", "thinned"]

#: Significant digits of numbers that are kept.
DIGITS = 5
#: Longer columns of numbers keep so many of their entries, the first and the last among them.
LONGEST = 200
#: Relative difference up to which two numbers agree: sums in another order, on another processor, change a training in float32.
SAME = 0.02


def path_of(name: str, folder: Path) -> Path:
    """The file of an experiment."""
    return folder / f"{name}.json"


def thinned(record: Record) -> Record:
    """The record with rounded numbers and short columns, for a repository."""
    plain = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    results = [dataclasses.replace(r, values=_thin(r.values), seconds=round(r.seconds, 1)) for r in record.results]
    return Record(**{**plain, "results": results, "panels": _thin(record.panels), "seconds": round(record.seconds, 1)})


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
    """Writes the thinned record; returns its file."""
    path = path_of(record.experiment, folder)
    write(path, thinned(record).to_json().encode() + b"\n")
    return path


def stored(name: str, folder: Path) -> Record:
    """The record of an experiment in a folder."""
    path = path_of(name, folder)
    if not path.is_file():
        known = sorted(str(p.relative_to(folder).with_suffix("")) for p in folder.rglob("*.json")) if folder.is_dir() else []
        raise InvalidArgument(
            f"There is no record of {name} at {path}; there are {', '.join(known) or 'none'}. Name the folder `records` of the "
            "repository by --records."
        )
    return Record.from_json(path.read_text(encoding="utf-8"))


def judged_anew(record: Record) -> Record:
    """The record with verdicts, notes and panels by the present rules, from the same results."""
    experiment = find(record.experiment)
    config = experiment.full.changed(record.config)
    about = "the verdicts are about these sizes"  # what --full has may have changed
    departures = [text for text in record.departures if not text.startswith(about) and text not in experiment.departures]
    return dataclasses.replace(
        record,
        checks=experiment.checks(config, record.results),
        panels=experiment.panels(config, record.results),
        notes=experiment.remarks(record.results),
        departures=[*departures, *about_sizes(config, experiment), *experiment.departures],
    )


def collect(runs: Path, folder: Path) -> list[Path]:
    """Stores the records of a folder of runs, judged by the present rules.

    Args:
        runs: `--out` of the runs.
        folder: Of records.
    """
    found = [runs / name / "record.json" for name in EXPERIMENTS]
    return [store(judged_anew(Record.from_json(path.read_text(encoding="utf-8"))), folder) for path in found if path.is_file()]


@dataclass(frozen=True)
class Comparison:
    """One task of a record, run anew.

    Attributes:
        task: The one that took the least time.
        differences: The greatest relative difference of each measurement; infinite where one of
            them has no number or another length.
        seconds: Of CPU time, now and when it was recorded.
    """

    task: Task
    differences: dict[str, float]
    seconds: tuple[float, float]

    @property
    def agrees(self) -> bool:
        """Whether all differences are at most `SAME`."""
        return all(difference <= SAME for difference in self.differences.values())


def compare(name: str, folder: Path) -> Comparison:
    """Runs the shortest task of a record anew, and compares all that it measures.

    Args:
        name: Of the experiment.
        folder: The records.
    """
    record = stored(name, folder)
    old = min(record.results, key=lambda result: result.seconds)
    new = execute(name, old.task)
    values = _thin(new.values)
    keys = [key for key in old.values if key in values]
    differences = {key: _difference(old.values[key], values[key]) for key in keys}
    differences |= {key: math.inf for key in old.values.keys() ^ values.keys()}
    return Comparison(old.task, differences, (new.seconds, old.seconds))


def _difference(old: Any, new: Any) -> float:
    """The greatest difference of numbers in parts of the greatest number; 0 where nothing is a
    number and all is equal."""
    a, b = list(_leaves(old)), list(_leaves(new))
    if [key for key, _ in a] != [key for key, _ in b]:
        return math.inf
    pairs = [(x, y) for (_, x), (_, y) in zip(a, b, strict=True)]
    numbers = [(x, y) for x, y in pairs if _is_number(x) and _is_number(y)]
    if any(x != y for x, y in pairs if not (_is_number(x) and _is_number(y))):
        return math.inf
    scale = max((abs(x) for x, _ in numbers), default=0.0)
    gap = max((abs(x - y) for x, y in numbers), default=0.0)
    return gap / scale if scale > 0 else (0.0 if gap == 0 else math.inf)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _leaves(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _leaves(part, (*place, key))
    elif isinstance(value, (list, tuple)):
        for i, part in enumerate(value):
            yield from _leaves(part, (*place, i))
    else:
        yield place, value


if __name__ == "__main__":
    for written in collect(Path(sys.argv[1]), Path(sys.argv[2])):
        print(written)
