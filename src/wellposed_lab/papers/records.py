"""The records in the repository: judged by the present rules, compared with a part run anew.

`python -m wellposed_lab.papers.records reproduced records` judges the runs of a folder (`--out`) by
the present rules, and stores them; with `records records`, those that are stored.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wellposed_lab.papers.experiment import Task
from wellposed_lab.papers.record import Record, measured_by_others
from wellposed_lab.papers.registry import EXPERIMENTS, find
from wellposed_lab.papers.run import about_sizes, environment, execute
from wellposed_lab.papers.storage import path_of, store, stored, thinned

__all__ = ["Comparison", "collect", "compare", "judged_anew"]

#: Relative difference up to which two numbers agree: sums in another order, on another processor, change a training in float32.
SAME = 0.02
#: Differences up to this are rounding: a relative error of 1e-15 is another number on another processor.
ROUNDING = 1e-9


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
        notes=[*experiment.remarks(record.results), *measured_by_others(record.results)],
        departures=[*departures, *about_sizes(config, experiment), *experiment.departures],
        environment=environment(),
    )


def collect(runs: Path, folder: Path) -> list[Path]:
    """Stores the records of a folder of runs, judged by the present rules.

    Args:
        runs: `--out` of the runs, or a folder of records.
        folder: Of records; the same one to judge its records anew.
    """
    found = [path for name in EXPERIMENTS for path in (runs / name / "record.json", path_of(name, runs))]
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
    values = thinned(dataclasses.replace(record, results=[new])).results[0].values
    keys = [key for key in old.values if key in values]
    differences = {key: _difference(old.values[key], values[key]) for key in keys}
    differences |= {key: math.inf for key in old.values.keys() ^ values.keys()}
    return Comparison(old.task, differences, (new.seconds, old.seconds))


def _difference(old: Any, new: Any) -> float:
    """The greatest difference of numbers in parts of the greatest number; 0 if it is rounding, and
    where nothing is a number and all is equal."""
    a, b = list(_leaves(old)), list(_leaves(new))
    if [key for key, _ in a] != [key for key, _ in b]:
        return math.inf
    pairs = [(x, y) for (_, x), (_, y) in zip(a, b, strict=True)]
    numbers = [(x, y) for x, y in pairs if _is_number(x) and _is_number(y)]
    if any(x != y for x, y in pairs if not (_is_number(x) and _is_number(y))):
        return math.inf
    scale = max((abs(x) for x, _ in numbers), default=0.0)
    gap = max((abs(x - y) for x, y in numbers), default=0.0)
    if gap <= ROUNDING:
        return 0.0
    return gap / scale if scale > 0 else math.inf


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
