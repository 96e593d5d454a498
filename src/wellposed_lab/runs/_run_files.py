"""The records in a run directory, read as if a stranger had written them; a refusal is a `RunError`.

No link is followed and no file is larger than its kind can be.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from wellposed._reading import files_in, read_bytes, read_object
from wellposed.certify import Certificate
from wellposed.certify._recorded import as_recorded
from wellposed.errors import InvalidArgument, RunError

__all__ = ["certificate_files", "read_certificate", "read_metrics", "read_sessions", "read_times"]

#: Bytes of metrics.jsonl and of times.jsonl; a row has about 250.
ROWS = 1 << 26
#: Bytes of a certificate and of environment.json; a certificate has about 10,000.
RECORD = 1 << 22

#: What a row of metrics.jsonl has in words; all else are numbers.
_WORDS = ("certified_by",)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl; a half-written last line is left out."""
    return _rows(folder, "metrics.jsonl", ("epoch",))


def read_times(folder: Path) -> list[dict[str, Any]]:
    """The rows of times.jsonl; a half-written last line is left out."""
    return _rows(folder, "times.jsonl", ("epoch", "seconds"))


def read_sessions(folder: Path) -> list[dict[str, Any]]:
    """The sessions in environment.json. It is a record for people: what cannot be read is no reason to refuse a run."""
    try:
        plain = read_object(folder / "environment.json", limit=RECORD, error=RunError, within=folder) or {}
    except RunError:
        return []
    sessions = plain.get("sessions")
    return [one for one in sessions if isinstance(one, dict)] if isinstance(sessions, list) else []


def certificate_files(folder: Path) -> list[tuple[int, Path]]:
    """(epoch, file) of the certificates of a run, in order; files of other names are not certificates."""
    found = files_in(folder / "certificates", "epoch-", ".json", error=RunError, within=folder)
    pairs = [(re.fullmatch(r"epoch-([0-9]{1,10})\.json", path.name), path) for path in found]
    return sorted((int(match.group(1)), path) for match, path in pairs if match)


def read_certificate(folder: Path, path: Path) -> Certificate:
    """A certificate of a run, as far as it agrees with itself: one that does not is UNDECIDED, and its note says why.

    Args:
        folder: The run directory.
        path: From `certificate_files`.
    """
    plain = read_object(path, limit=RECORD, error=RunError, within=folder)
    if plain is None:
        raise RunError(f"{path} is missing.")
    try:
        return as_recorded(plain)[0]
    except InvalidArgument as problem:
        raise RunError(f"{path} is damaged: {problem} Put a good copy back, or delete it.") from None


def _rows(folder: Path, name: str, needed: tuple[str, ...]) -> list[dict[str, Any]]:
    path = folder / name
    content = read_bytes(path, limit=ROWS, error=RunError, within=folder)
    lines = [] if content is None else content.split(b"\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):  # ValueError: not UTF-8, not JSON, or thousands of digits
            if number == len(lines):
                break  # a process was killed while it wrote this line
            row = None
        if not _is_row(row, needed):
            raise RunError(f"{path} is damaged in line {number}; put a good copy back, or start a new run.")
        rows.append(row)
    return rows


def _is_row(row: Any, needed: tuple[str, ...]) -> bool:
    if not isinstance(row, dict) or type(row.get("epoch")) is not int or row["epoch"] < 0:
        return False
    if any(row.get(name) is None or isinstance(row[name], (bool, str)) for name in needed):
        return False
    return all(
        _is_text(name) and (value is None or _is_number(value) or (name in _WORDS and _is_text(value)))
        for name, value in row.items()
    )


def _is_text(value: Any) -> bool:
    """Text that UTF-8 can hold; JSON can state half of a pair of surrogates."""
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)


def _is_number(value: Any) -> bool:
    """A finite number that torch and Parquet can hold, or a truth value."""
    if isinstance(value, int):
        return abs(value) < 2**63
    return isinstance(value, float) and math.isfinite(value)
