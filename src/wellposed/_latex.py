"""Results as LaTeX: text, numbers and tables that compile without a package."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence

from wellposed._latex_characters import in_ascii

_CITATION = re.compile(r"\[([a-z]+[12][0-9]{3}[a-z]?|wellposed)(?:, ([^\]]*))?\]")
#: What is set as mathematics inside a text: relations, and numbers with an exponent.
_MATHEMATICS = re.compile(r"<=|>=|(?<![\w.])-?\d+(?:\.\d+)?e[+-]?\d+(?![\w.]*\w)", re.ASCII)
RELATIONS = {"<": "$<$", "<=": r"$\le$", ">": "$>$", ">=": r"$\ge$"}


def text(plain: str) -> str:
    r"""Plain text in ASCII, with its special characters as commands; [ling2022, (7)] becomes
    \cite[(7)]{ling2022}."""
    parts, end = [], 0
    for found in _CITATION.finditer(plain):
        place = f"[{_escaped(found[2])}]" if found[2] else ""
        parts += [_escaped(plain[end : found.start()]), rf"\cite{place}{{{found[1]}}}"]
        end = found.end()
    return "".join([*parts, _escaped(plain[end:])])


def number(value: float | None, digits: int = 4) -> str:
    r"""A number with so many significant digits: $6.617$, $1.28\times 10^{-18}$, $\infty$; a dash
    if there is none."""
    if value is None or math.isnan(value):
        return "--"
    if math.isinf(value):
        return r"$\infty$" if value > 0 else r"$-\infty$"
    value = 0.0 if abs(value) < sys.float_info.min else value  # the rounding of 0
    mantissa, _, exponent = f"{value:.{digits}g}".partition("e")
    return f"${mantissa}$" if not exponent else rf"${mantissa}\times 10^{{{int(exponent)}}}$"


def table(columns: str, rows: Sequence[Sequence[str]], caption: str, *, heading: bool = False) -> str:
    """A table environment.

    Args:
        columns: The argument of tabular. What may be long needs a column p{...}, which wraps; those
            and the others must together be as wide as the text at most.
        rows: Cells in LaTeX.
        caption: In LaTeX.
        heading: Whether a line follows the first row.
    """
    lines = [
        r"\begin{table}",
        r"  \centering",
        r"  \small",
        r"  \setlength{\tabcolsep}{3pt}",
        rf"  \caption{{{caption}}}",
        rf"  \begin{{tabular}}{{{columns}}}",
        r"    \hline",
    ]
    for index, row in enumerate(rows):
        lines.append(f"    {' & '.join(row)} \\\\")
        if heading and index == 0:
            lines.append(r"    \hline")
    return "\n".join([*lines, r"    \hline", r"  \end{tabular}", r"\end{table}", ""])


def wrapped(plain: str) -> str:
    """Text in a column p{...} other than the last, with its words not spread over the line."""
    return rf"\raggedright {text(plain)}"


def _escaped(plain: str) -> str:
    parts, end = [], 0
    for found in _MATHEMATICS.finditer(plain):
        mantissa, _, exponent = found[0].partition("e")
        parts += [
            in_ascii(plain[end : found.start()]),
            RELATIONS.get(found[0], rf"${mantissa}\times 10^{{{int(exponent or 0)}}}$"),
        ]
        end = found.end()
    return re.sub(r"\s+", " ", "".join([*parts, in_ascii(plain[end:])]))
