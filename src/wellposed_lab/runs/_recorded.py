"""The last certificate of a run as its files have it, compared with the rows that were written with it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wellposed.certify import Certificate, Verdict
from wellposed_lab.runs._run_files import certificate_files, read_certificate

__all__ = ["Recorded", "last_recorded"]


@dataclass(frozen=True)
class Recorded:
    """A certificate that a file holds; nothing but the file stands behind it.

    Attributes:
        name: Of the file.
        certificate: UNDECIDED if it contradicts itself or its row.
        contradiction: How it contradicts its row, in a sentence; empty if it does not.
    """

    name: str
    certificate: Certificate
    contradiction: str = ""


def last_recorded(folder: Path, rows: Sequence[Mapping[str, Any]]) -> Recorded | None:
    """The last certificate of a run directory; None without any.

    Args:
        folder: The run directory.
        rows: Of metrics.jsonl.

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
