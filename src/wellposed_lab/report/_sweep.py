"""The page of a sweep: mean and spread at every point of its grid, and its runs."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wellposed.errors import InvalidArgument
from wellposed_lab.report._charts import losses, measure
from wellposed_lab.report._page import Part, Section, number, page, table
from wellposed_lab.report._read import read_run
from wellposed_lab.report._write import _named, _overview, _save

__all__ = ["certified_text", "spread_text", "sweep_page"]

#: Runs whose curves are drawn.
DRAWN = 24


def sweep_page(
    points: Sequence[Mapping[str, Any]],
    run_dirs: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    failed: Mapping[str, str] | None = None,
) -> Path:
    """Writes one page about the runs of a sweep.

    Args:
        points: From `wellposed_lab.runs.sweep.spreads`.
        run_dirs: The run directories; those that hold nothing yet are named.
        out: The file.
        failed: Names of runs that were not averaged, and why.

    Returns:
        The path of the file.
    """
    found, remarks = [], [f"{name} is not averaged: {reason}" for name, reason in (failed or {}).items()]
    for folder in map(Path, run_dirs):
        try:
            found.append(read_run(folder))
        except InvalidArgument as error:
            remarks.append(f"{folder.name}: {error}")
    runs = _named(found)
    remarks += [f"{run.name}: {remark}" for run in runs for remark in run.remarks]
    shown = runs[:DRAWN]
    said = f"The curves are those of the first {DRAWN} of {len(runs)} runs." if len(runs) > DRAWN else None
    sections = [
        Section("results", "Mean and spread", [_results(points)]),
        Section("training", "Training", [said, losses(shown), measure(shown, "accuracy")]),
        Section("runs", "Runs", [_overview(runs)]),
    ]
    return _save(page(f"Sweep of {len(run_dirs)} runs", f"{len(points)} points", sections, remarks), out)


def spread_text(measured: Mapping[str, float | None] | None) -> str:
    """`0.93 ± 0.01`: mean and standard deviation over the seeds, where there are several."""
    if measured is None:
        return "–"
    spread = measured["spread"]
    return number(measured["mean"]) + ("" if spread is None else f"\xa0±\xa0{number(spread)}")  # on one line


def certified_text(point: Mapping[str, Any]) -> str:
    """`2 of 3` runs that were averaged; a dash if none made a certificate."""
    return "–" if point["certified"] is None else f"{point['certified']} of {point['averaged']}"


def _results(points: Sequence[Mapping[str, Any]]) -> Part:
    keys = list(dict.fromkeys(key for point in points for key in point["point"]))
    names = list(dict.fromkeys(name for point in points for name in point["measures"]))
    rows = [
        (
            *(json.dumps(point["point"][key]).strip('"') for key in keys),
            f"{point['averaged']} of {point['runs']}",
            *(spread_text(point["measures"].get(name)) for name in names),
            certified_text(point),
        )
        for point in points
    ]
    header = (*keys, "runs averaged", *(name.replace("_", " ") for name in names), "certified")
    return table("Mean ± standard deviation over the seeds, at the last epoch", header, rows)
