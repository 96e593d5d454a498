"""The files of a run directory, as far as they can be read."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wellposed._reading import files_in, opened, parse_json, read_bytes
from wellposed.certify import Certificate
from wellposed.certify._recorded import as_recorded
from wellposed.data._load import short_name
from wellposed.errors import InvalidArgument, RunError, how_to_install
from wellposed_lab.runs.records import RECORD, ROWS, certificate_files

__all__ = ["RunData", "as_number", "read_run"]

#: Lines of log.txt on the page, and characters of one.
LOG_LINES, LOG_WIDTH = 200, 2000


@dataclass
class RunData:
    """The files of a run. A missing or damaged part is empty, with a sentence in `remarks`.

    Attributes:
        folder: Of the run.
        name: Of the folder.
        config: Sections with keys.
        config_text: The text of config.yaml.
        sessions: Of environment.json.
        rows: Of metrics.jsonl, in order.
        seconds: All epochs together, of times.jsonl.
        summary: Of summary.json, which a run that has not ended does not have.
        certificates: (epoch, certificate), in order.
        log: The last lines.
        remarks: What could not be read, a sentence each.
    """

    folder: Path
    name: str
    config: dict[str, Any] = field(default_factory=dict)
    config_text: str = ""
    sessions: list[dict[str, Any]] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    seconds: float | None = None
    summary: dict[str, Any] = field(default_factory=dict)
    certificates: list[tuple[int, Certificate]] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    def column(self, name: str) -> list[tuple[float, float]]:
        """(epoch, value) where a row has a finite number of this name."""
        points = [(as_number(row.get("epoch")), as_number(row.get(name))) for row in self.rows]
        return [(epoch, value) for epoch, value in points if epoch is not None and value is not None]

    def last(self, name: str) -> Any:
        """The last known value of a column."""
        return next((row[name] for row in reversed(self.rows) if row.get(name) is not None), None)

    def key(self, section: str, name: str) -> Any:
        """A value of the configuration, or None."""
        keys = self.config.get(section)
        return keys.get(name) if isinstance(keys, dict) else None

    @property
    def described(self) -> str:
        """What was trained on what, in a line; of a data file its name, not the folder it is in."""
        model, data, width = self.key("model", "name"), self.key("data", "name"), self.key("model", "width")
        if model is None or data is None:
            return "A training run."
        started = self.sessions[0].get("started") if self.sessions else None
        return f"{model} of width {width} on {short_name(str(data))}" + (f", started {started}" if started else "")


def read_run(folder: Path) -> RunData:
    """Reads a run directory.

    Raises:
        InvalidArgument: The path is not a directory, or contains nothing of a run.
    """
    if not folder.is_dir():
        raise InvalidArgument(f"{folder} is not a run directory; give one that `wellposed train` made, such as runs/first.")
    run = RunData(folder, folder.resolve().name)
    text = _text(run, "config.yaml")
    run.config_text = text or ""
    run.config = _config(run, run.config_text)
    run.rows = [row for row in _lines(run, "metrics.jsonl") if as_number(row.get("epoch")) is not None]
    times = [as_number(row.get("seconds")) for row in _lines(run, "times.jsonl", optional=True)]
    run.seconds = sum(time for time in times if time is not None) if times else None
    if run.seconds is not None and not math.isfinite(run.seconds):
        run.seconds = None
        run.remarks.append("times.jsonl: the times are left out, because their sum is not finite.")
    environment = _json(run, "environment.json")
    sessions = environment.get("sessions") if isinstance(environment, dict) else None
    run.sessions = [one for one in sessions if isinstance(one, dict)] if isinstance(sessions, list) else []
    summary = _json(run, "summary.json", optional=True)
    run.summary = summary if isinstance(summary, dict) else {}
    run.certificates = _certificates(run)
    run.log = _last_lines(run, "log.txt")
    if not (text or run.rows or run.certificates):
        raise InvalidArgument(f"{folder} holds no config.yaml, metrics.jsonl or certificates, so it is not a run directory.")
    return run


def as_number(value: Any) -> float | None:
    """A finite number; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or abs(value) > sys.float_info.max:
        return None
    return float(value) if math.isfinite(value) else None


def _text(run: RunData, name: str, limit: int = RECORD, *, optional: bool = False) -> str | None:
    try:
        content = read_bytes(run.folder / name, limit=limit, error=RunError, within=run.folder)
    except RunError as error:
        run.remarks.append(f"{name} is omitted: {error}")
        return None
    if content is None:
        if not optional:
            run.remarks.append(f"{name} is missing.")
        return None
    return content.decode("utf-8", errors="replace")


def _last_lines(run: RunData, name: str) -> list[str]:
    """The end of a file that may be of any size."""
    try:
        with opened(run.folder / name, limit=sys.maxsize, error=RunError, within=run.folder) as found:
            if found is None:
                return []
            file, size = found
            file.seek(max(0, size - LOG_LINES * LOG_WIDTH))
            text = file.read(LOG_LINES * LOG_WIDTH).decode("utf-8", errors="replace")
    except RunError as error:
        run.remarks.append(f"{name} is omitted: {error}")
        return []
    return [line[:LOG_WIDTH] for line in text.splitlines()[-LOG_LINES:]]


def _json(run: RunData, name: str, *, optional: bool = False) -> Any:
    text = _text(run, name, optional=optional)
    if text is None:
        return None
    try:
        return parse_json(text, name, error=RunError)
    except RunError:
        run.remarks.append(f"{name} is damaged and omitted.")
        return None


def _lines(run: RunData, name: str, *, optional: bool = False) -> list[dict[str, Any]]:
    """Rows of a JSON Lines file; other lines are counted and omitted."""
    rows, damaged = [], 0
    for line in (_text(run, name, ROWS, optional=optional) or "").split("\n"):
        try:
            row = json.loads(line) if line.strip() else None
        except (ValueError, RecursionError):
            damaged += 1
            continue
        if isinstance(row, dict) and not any(isinstance(value, (dict, list)) for value in row.values()):
            rows.append(row)
        elif row is not None:
            damaged += 1
    if damaged:
        what = "1 line is cut off or damaged and is" if damaged == 1 else f"{damaged} lines are cut off or damaged and are"
        run.remarks.append(f"{name}: {what} omitted.")
    return rows


def _config(run: RunData, text: str) -> dict[str, Any]:
    if not text:
        return {}
    try:
        from wellposed_lab.runs.config import BYTES, parse_yaml
    except ImportError:
        run.remarks.append(f"config.yaml is shown as text, because pyyaml is not installed; {how_to_install('cli')}.")
        return {}
    try:
        plain = parse_yaml(text, "config.yaml") if len(text) <= BYTES else None
    except InvalidArgument:
        plain = None
    if not isinstance(plain, dict):
        run.remarks.append("config.yaml is not a YAML file with sections; it is shown as text.")
        return {}
    return {str(section): keys for section, keys in plain.items()}


def _certificates(run: RunData) -> list[tuple[int, Certificate]]:
    """Those that can be read, as far as they agree with themselves."""
    found, size = [], 0
    try:
        files = certificate_files(run.folder)
    except RunError as error:
        run.remarks.append(f"certificates/ is omitted: {error}")
        return []
    named = {path for _, path in files}
    for path in files_in(run.folder / "certificates", "epoch-", ".json", error=RunError, within=run.folder):
        if path not in named:
            run.remarks.append(f"certificates/{path.name} is not a certificate and is omitted.")
    for epoch, path in files:
        name = f"certificates/{path.name}"
        plain = _json(run, name)
        size += path.lstat().st_size if plain is not None else 0
        if size > ROWS:
            run.remarks.append(
                f"{name} and those after it are omitted: all certificates together have more than {ROWS:,} bytes."
            )
            break
        if plain is None:
            continue
        try:
            certificate, said = as_recorded(plain)
        except InvalidArgument:
            run.remarks.append(f"{name} is not a certificate and is omitted.")
            continue
        run.remarks += [f"{name} {sentence}." for sentence in said]
        found.append((epoch, certificate))
    return found
