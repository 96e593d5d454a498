"""Mean and spread over the seeds of a sweep."""

from __future__ import annotations

import itertools
import json
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from wellposed.certify import Verdict

if TYPE_CHECKING:
    from wellposed_lab.runs.sweep import SweepRun

#: Of numbers that are averaged: sums of more do not overflow.
_LARGEST = 1e300


def spreads(runs: Sequence[SweepRun], results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For every point of the grid: mean and standard deviation over its seeds, by measure.

    Runs that failed or became infinite are counted and not averaged; `certified` counts those whose
    last certificate holds, and is None if there is none. A measure that a run lacks, or that is not
    finite there, is omitted. The standard deviation is that of a sample (divided by the number less
    1), and None for one run.
    """
    found = []
    for _, group in itertools.groupby(
        zip(runs, results, strict=True), key=lambda pair: json.dumps(pair[0].point, sort_keys=True)
    ):
        members = list(group)
        sound = [result for _, result in members if result.get("stop") not in (None, "not_finite")]
        measures: dict[str, dict[str, float | None]] = {}
        for name in dict.fromkeys(name for result in sound for name in result["last"]):
            if re.match("(train|validation|test)_|equilibrium_steps", name):
                values = [result["last"].get(name) for result in sound]
                if all(_can_be_averaged(value) for value in values):
                    spread = statistics.stdev(values) if len(values) > 1 else None
                    measures[name] = {"mean": statistics.fmean(values), "spread": spread}
        verdicts = [(result.get("certificate") or {}).get("verdict") for result in sound]
        certified = None if all(verdict is None for verdict in verdicts) else verdicts.count(Verdict.CERTIFIED.value)
        found.append(
            {
                "point": members[0][0].point,
                "runs": len(members),
                "averaged": len(sound),
                "certified": certified,
                "measures": measures,
            }
        )
    return found


def _can_be_averaged(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < _LARGEST  # NaN is not
