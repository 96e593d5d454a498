"""The page of a comparison."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from wellposed.certify import Certificate
from wellposed.errors import InvalidArgument
from wellposed_lab.report._certified import margins
from wellposed_lab.report._html import Html, el, table
from wellposed_lab.report._loss_charts import losses, margin, measure, norm_lines
from wellposed_lab.report._network import spectrum
from wellposed_lab.report._page import Section, page
from wellposed_lab.report._read import RunFiles, read_run
from wellposed_lab.report._sections import badge, sentence
from wellposed_lab.report._state import network_state
from wellposed_lab.report._write import described, save
from wellposed_lab.runs.records import moves

__all__ = ["compare"]


def compare(run_dirs: Iterable[str | os.PathLike[str]], out: str | os.PathLike[str]) -> Path:
    """Writes one page about several runs: their curves in the same figures, and where their configurations differ.

    Args:
        run_dirs: Two or more run directories.
        out: The file.

    Returns:
        The path of the file.
    """
    folders = [Path(folder) for folder in run_dirs]
    if len(folders) < 2:
        raise InvalidArgument(f"A comparison needs two or more run directories; got {len(folders)}. For one, use report.write.")
    runs = _named([read_run(folder) for folder in folders])
    states = {run.name: network_state(run.folder) for run in runs}
    remarks = [f"{run.name}: {remark}" for run in runs for remark in (*run.remarks, *states[run.name].remarks)]
    sections = [
        Section("glance", "At a glance", [_overview(runs)]),
        Section("differences", "What differs", [_differences(runs)]),
        Section(
            "training", "Training", [losses(runs), *(measure(runs, name) for name in ("accuracy", "miou", "equilibrium_steps"))]
        ),
        Section("certificates", "Certificates", [margin(runs)]),
        Section("network", "Networks", [spectrum(states), norm_lines(runs), _parameters(states)]),
    ]
    return save(page(f"Comparison of {len(runs)} runs", ", ".join(run.name for run in runs), sections, remarks), out)


def _named(runs: Sequence[RunFiles]) -> list[RunFiles]:
    """Runs with different names: folders of the same name get a number."""
    names: list[str] = []
    for run in runs:
        name, count = run.name, 2
        while name in names:
            name, count = f"{run.name} ({count})", count + 1
        names.append(name)
    return [replace(run, name=name) for run, name in zip(runs, names, strict=True)]


def _overview(runs: Sequence[RunFiles]) -> Html:
    columns = ["train_loss", "validation_loss", "test_loss", "train_accuracy", "test_accuracy", "test_miou"]
    columns = [name for name in columns if any(run.last(name) is not None for run in runs)]
    rows: list[tuple[Any, ...]] = []
    for run in runs:
        last = run.certificates[-1][1] if run.certificates else None
        least = [min(value for _, value in points) for points in margins(run).values()]
        verdict = "none" if last is None else el("span", badge(last.verdict), f" {last.theorem}", _moves(last))
        rows.append(
            (run.name, described(run), *(run.last(name) for name in columns), verdict, min(least, default=None), run.seconds)
        )
    header = ("run", "what", *(name.replace("_", " ") for name in columns), "last certificate", "least margin", "seconds")
    return table("Runs", header, rows)


def _moves(certificate: Certificate) -> str:
    return f", {moves(certificate)}" if certificate.certified and certificate.rate is not None else ""


def _differences(runs: Sequence[RunFiles]) -> Html:
    flat = [
        {
            f"{section}.{key}": value
            for section, keys in run.config.items()
            if isinstance(keys, dict)
            for key, value in keys.items()
        }
        for run in runs
    ]
    names = dict.fromkeys(name for config in flat for name in config)
    texts = {name: [json.dumps(config[name], default=str) if name in config else "–" for config in flat] for name in names}
    rows = [(name, *values) for name, values in texts.items() if len(set(values)) > 1]
    if not rows:
        return sentence("The configurations are equal, as far as they can be read.")
    return table("Keys of the configuration that differ", ("key", *(run.name for run in runs)), rows)


def _parameters(states: dict[str, Any]) -> Html | None:
    rows = [(name, p.name, p.start, p.now, p.distance) for name, state in states.items() for p in state.parameters]
    header = ("run", "parameter", "at the start", "now", "distance")
    return table("Frobenius norms of the parameters", header, rows) if rows else None
