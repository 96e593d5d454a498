"""A certificate in words: its hypotheses as a table, plain and in LaTeX, and what moves."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from wellposed._latex import RELATIONS, number, table, text, wrapped

if TYPE_CHECKING:
    from wellposed.certify.certificate import Certificate, Hypothesis

_WORDS = {True: "holds", False: "fails", None: "undecided"}
#: Hidden steps below this fraction of the read-out's count as none: then training of the read-out is proved.
NEGLIGIBLE = 1e-3


def hidden_ratio(certificate: Certificate) -> float:
    """The smallest licensed step, or speed of a flow, over the largest: hidden over read-out."""
    speeds = certificate.rates if certificate.dynamics == "flow" else certificate.step_size
    known = [value for value in speeds.values() if 0 < value < math.inf] if isinstance(speeds, Mapping) else []
    return min(known) / max(known) if known else 1.0


def moves(certificate: Certificate) -> str:
    """Which parameters move along what is licensed: all, or almost only the read-out."""
    ratio, what = hidden_ratio(certificate), "speeds" if certificate.dynamics == "flow" else "steps"
    if ratio == 1:
        return f"all parameters with equal {what}"
    if ratio < NEGLIGIBLE:
        return f"read-out only (hidden {what} are {ratio:.2g} times as large)"
    return f"all parameters, hidden {what} {ratio:.2g} of the read-out's"


def short(value: float | None) -> str:
    """A number in words: 0 for one that is only the rounding of 0, "?" for none."""
    return "?" if value is None else f"{0.0 if abs(value) < sys.float_info.min else value:.4g}"


def plain_table(hypotheses: tuple[Hypothesis, ...]) -> list[str]:
    """Lines of equal columns; a note is at the end of its line."""
    if not hypotheses:
        return []

    rows = [("hypothesis", "source", "value", "", "bound", "")]
    rows += [(h.name, h.equation, short(h.value), h.relation, short(h.bound), _WORDS[h.holds]) for h in hypotheses]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    for row, h in enumerate(hypotheses, start=2):
        if h.note:
            lines[row] += f"  ({h.note})"
    return lines


def certificate_latex(certificate: Certificate) -> str:
    """A row for each hypothesis; the caption says the verdict, what follows, and the numbers."""
    rows = [["hypothesis", "source", "value", "", "bound", ""]]
    rows += [
        [wrapped(h.name), wrapped(h.equation), number(h.value), RELATIONS[h.relation], number(h.bound), _WORDS[h.holds]]
        for h in certificate.hypotheses
    ]
    kind = f" ({certificate.dynamics})" if certificate.dynamics else ""
    title = f"Theorem {certificate.theorem}{kind}: {certificate.verdict.value}."
    sentences = [text(_sentence(part)) for part in (title, certificate.note, *certificate.licenses) if part]
    if certificate.rate is not None:
        sentences.append(f"Rate: {number(certificate.rate, 10)}.")
    for label, numbers in (("Step size", certificate.step_size), ("Radii", certificate.radii)):
        if numbers is not None:
            named = {"": numbers} if isinstance(numbers, float) else dict(numbers)
            sentences.append(f"{label}: {', '.join(f'{text(key)} {number(value)}'.strip() for key, value in named.items())}.")
    return table(r"p{0.27\linewidth}p{0.16\linewidth}rcrl", rows, " ".join(sentences), heading=True)


def _sentence(part: str) -> str:
    """With a capital and an end."""
    return part[0].upper() + part[1:] + ("" if part.endswith((".", "!", "?")) else ".")
