"""Which runs of a sweep have ended, and with the configuration that the sweep has for them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from wellposed._reading import read_object
from wellposed.certify import Verdict
from wellposed.errors import RunError
from wellposed_lab.runs.config_sections import RunConfig
from wellposed_lab.runs.epoch_logger import STOPS
from wellposed_lab.runs.records import RECORD, last_values, read_metrics
from wellposed_lab.runs.run import read_config

__all__ = ["check_same", "ended"]

#: What decides, beside the length, where a run ends; no part of its fingerprint.
_ENDS = ("stop_loss", "patience")

#: About a damaged summary.
_ADVICE = "Remove it: the sweep writes it anew from the records of the run."


def ended(config: RunConfig, folder: Path) -> dict[str, Any] | None:
    """The summary of a run that has ended; None if it is to be trained, or to be trained on.

    A summary that does not say what metrics.jsonl says is not of an ended run: training writes it
    anew.

    Args:
        config: What the sweep has for this run.
        folder: Of the run.

    Raises:
        RunError: The run has another configuration, or is damaged.
    """
    if not os.path.lexists(folder / "summary.json") or not (folder / "config.yaml").exists():
        return None
    check_same(config, folder)
    summary = _summary(folder)
    stop, last = summary.get("stop"), last_values(read_metrics(folder))
    if not isinstance(stop, str) or stop not in STOPS or stop == "interrupted" or summary.get("last") != last:
        return None
    if stop == "epochs" and last.get("epoch") != config.run.epochs:
        return None  # of a shorter run
    if stop in _ENDS and getattr(config.run, stop) is None:
        return None
    certificate = summary.get("certificate") or {}
    if not isinstance(certificate, dict):
        raise RunError(f"{folder / 'summary.json'} is damaged: its certificate is not an object. {_ADVICE}")
    if certificate.get("verdict") == Verdict.CERTIFIED.value and not last.get("certified"):
        return None
    return summary


def _summary(folder: Path) -> dict[str, Any]:
    try:
        return read_object(folder / "summary.json", limit=RECORD, error=RunError, within=folder) or {}
    except RunError as error:
        raise RunError(f"{error} {_ADVICE}") from None


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
