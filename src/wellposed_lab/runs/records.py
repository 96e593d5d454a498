"""The records in a run directory, read without trust, and what a certificate licenses, in words.

No link is followed, and no file may be larger than its kind can be; a refusal is a `RunError`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wellposed._reading import files_in, read_bytes, read_object
from wellposed.certify import Certificate, Verdict
from wellposed.certify._certificate_table import hidden_ratio, moves
from wellposed.certify._recorded import as_recorded
from wellposed.errors import InvalidArgument, RunError

__all__ = [
    "Recorded",
    "certificate_files",
    "each",
    "finite",
    "halving",
    "hidden_ratio",
    "last_recorded",
    "last_values",
    "licence",
    "moves",
    "plain_flow",
    "read_certificate",
    "read_metrics",
    "read_sessions",
    "read_times",
]

#: Largest size in bytes of metrics.jsonl and of times.jsonl; a row has about 250.
ROWS = 1 << 26
#: Largest size in bytes of a certificate and of environment.json; a certificate has about 10,000.
RECORD = 1 << 22
#: Columns of metrics.jsonl that are text; all others are numbers.
_WORDS = ("certified_by",)


def finite(value: Any) -> Any:
    """With null in place of NaN and infinities, which JSON lacks."""
    if isinstance(value, dict):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_metrics(folder: str | Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl, without a half-written last line."""
    return _rows(Path(folder), "metrics.jsonl", ("epoch",))


def last_values(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The last value of every column; not all rows have all of them."""
    last: dict[str, Any] = {}
    for row in rows:
        last |= {key: value for key, value in row.items() if value is not None or key == "certified_rate"}
    return last


def read_times(folder: Path) -> list[dict[str, Any]]:
    """The rows of times.jsonl, without a half-written last line."""
    return _rows(folder, "times.jsonl", ("epoch", "seconds"))


def read_sessions(folder: Path) -> list[dict[str, Any]]:
    """The sessions in environment.json; empty if it cannot be read."""
    try:
        plain = read_object(folder / "environment.json", limit=RECORD, error=RunError, within=folder) or {}
    except RunError:
        return []
    sessions = plain.get("sessions")
    return [one for one in sessions if isinstance(one, dict)] if isinstance(sessions, list) else []


def certificate_files(folder: Path) -> list[tuple[int, Path]]:
    """(epoch, file) of the certificates of a run, in order."""
    found = files_in(folder / "certificates", "epoch-", ".json", error=RunError, within=folder)
    pairs = [(re.fullmatch(r"epoch-([0-9]{1,10})\.json", path.name), path) for path in found]
    return sorted((int(match.group(1)), path) for match, path in pairs if match)


def read_certificate(folder: Path, path: Path) -> Certificate:
    """A certificate of a run; one that contradicts itself becomes UNDECIDED, with a note.

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


@dataclass(frozen=True)
class Recorded:
    """A certificate that only a file supports.

    Attributes:
        name: Of the file.
        certificate: UNDECIDED if it contradicts itself or its row.
        contradiction: How it contradicts its row, in a sentence; empty if it does not.
    """

    name: str
    certificate: Certificate
    contradiction: str = ""


def last_recorded(folder: Path, rows: Sequence[Mapping[str, Any]]) -> Recorded | None:
    """The last certificate of a run, compared with its row in metrics.jsonl; None without any.

    Args:
        folder: The run directory.
        rows: From `read_metrics`.

    Raises:
        RunError: The file is not a certificate.
    """
    files = certificate_files(folder)
    if not files:
        return None
    epoch, path = files[-1]
    certificate = read_certificate(folder, path)
    row = next((row for row in rows if row["epoch"] == epoch), {})
    rate = certificate.rate
    claimed = {
        "certified": certificate.certified,
        "certified_by": certificate.theorem,
        "certified_rate": rate if rate is None or math.isfinite(rate) else None,
    }
    odd = [name for name, value in claimed.items() if row.get(name) != value]
    if not odd:
        return Recorded(path.name, certificate)
    said = f"{path.name} contradicts metrics.jsonl ({odd[0]} of epoch {epoch} is {row.get(odd[0])!r:.60} there)"
    return Recorded(path.name, Certificate(certificate.theorem, Verdict.UNDECIDED, note=f"{said}."), said)


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


def each(certificate: Certificate) -> Iterator[Certificate]:
    """A certificate, and those of other theorems tried with it."""
    yield certificate
    for other in certificate.others:
        yield from each(other)


def halving(certificate: Certificate) -> str:
    """The longest time in which the residual halves: steps of descent, or time of a flow."""
    rate, flows = certificate.rate, certificate.dynamics == "flow"
    if rate is None or not (0 < rate < math.inf if flows else 0 <= rate < 1):
        return "no rate is proved"
    if flows:
        return f"|r| halves within time {math.log(2) / rate:.3g}"
    if rate <= 0.5:
        return "|r| halves within 1 step"
    steps = math.log(2) / -math.log(rate)
    # three digits, upwards: what is shown is still a bound
    unit = 10 ** max(0, math.floor(math.log10(steps)) - 2)
    return f"|r| halves within {math.ceil(steps / unit) * unit:,} steps"


def plain_flow(certificate: Certificate) -> str:
    """The verdict of the radius certificate about plain gradient flow (equal speeds)."""
    flows = (one for one in each(certificate) if (one.theorem, one.dynamics) == ("radius", "flow"))
    found = [str(one.verdict) for one in flows if hidden_ratio(one) == 1]
    return f"plain gradient flow: {found[0] if found else 'not tried'}"


def licence(certificate: Certificate) -> str:
    """What moves, how fast the residual falls, the verdict about plain flow; "" without a rate."""
    if not certificate.certified or certificate.rate is None:
        return ""
    if certificate.dynamics == "flow" and hidden_ratio(certificate) == 1:
        return f"plain gradient flow, {halving(certificate)}"
    return f"{moves(certificate)}; {halving(certificate)}; {plain_flow(certificate)}"
