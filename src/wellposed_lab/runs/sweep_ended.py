"""Which runs of a sweep have ended, and with the configuration that the sweep has for them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from wellposed._reading import parse_json, read_text
from wellposed.errors import RunError
from wellposed_lab.runs.config_sections import RunConfig
from wellposed_lab.runs.records import RECORD, read_metrics
from wellposed_lab.runs.run import read_config

__all__ = ["check_same", "ended"]

#: What decides, beside the length, where a run ends; no part of its fingerprint.
_ENDS = ("stop_loss", "patience")


def ended(config: RunConfig, folder: Path) -> dict[str, Any] | None:
    """The summary of a run that has ended; None if it is to be trained, or to be trained on.

    Args:
        config: What the sweep has for this run.
        folder: Of the run.

    Raises:
        RunError: The run has another configuration, or is damaged.
    """
    if not os.path.lexists(folder / "summary.json") or not (folder / "config.yaml").exists():
        return None
    check_same(config, folder)
    text = read_text(folder / "summary.json", limit=RECORD, error=RunError, within=folder)
    summary = parse_json(text or "", str(folder / "summary.json"), error=RunError)
    sound = isinstance(summary, dict) and isinstance(summary.get("stop"), str) and isinstance(summary.get("last"), dict)
    if not sound or summary["stop"] == "interrupted":
        return None
    if summary["stop"] == "epochs" and summary["last"].get("epoch") != config.run.epochs:
        return None  # of a shorter run
    if not isinstance(summary.get("certificate") or {}, dict):
        raise RunError(f"{folder / 'summary.json'} is damaged: its certificate is not an object. Remove it to train the run.")
    return summary


def check_same(config: RunConfig, folder: Path) -> None:
    """Raises `RunError` unless a run has this configuration, as far as it went: it may be
    shorter."""
    before, advice = read_config(folder), "remove it, or choose another --out."
    if before.fingerprint() != config.fingerprint():
        raise RunError(f"{folder} was trained with another configuration; {advice}")
    for key in _ENDS:
        old, new = getattr(before.run, key), getattr(config.run, key)
        if old != new:
            raise RunError(f"{folder} was trained with run.{key}={old}, and the sweep has {new}; {advice}")
    longest = max([before.run.epochs, *(row["epoch"] for row in read_metrics(folder))])
    if longest > config.run.epochs:
        raise RunError(f"{folder} was trained for {longest} epochs, and the sweep has run.epochs={config.run.epochs}; {advice}")
