"""Rows of the audit as JSON and as a page."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Sequence
from typing import Any

from wellposed_lab.papers.audit._finding import ROLES, Row

__all__ = ["counts", "to_html", "to_json"]

STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 90rem; padding: 0 1rem; color: #1b1b1b; }
table { border-collapse: collapse; width: 100%; table-layout: fixed; overflow-wrap: anywhere; }
th:nth-child(1), th:nth-child(3) { width: 12%; } th:nth-child(5) { width: 36%; }
th, td { text-align: left; vertical-align: top; padding: .45rem .6rem; border-bottom: 1px solid #ddd; }
th { position: sticky; top: 0; background: #fff; }
td.evidence { font-size: 13px; } .printed { color: #9a3412; } .corrected { color: #166534; } .given { color: #555; }
tr.no td { background: #fee2e2; } .false { font-weight: bold; text-decoration: underline; }
"""


def counts(rows: Sequence[Row]) -> dict[str, int]:
    """How many rows there are, and how many the numbers of this run confirm."""
    return {
        "rows": len(rows),
        "differ from the print": sum(row.finding.verdict != "holds" for row in rows),
        "confirmed": sum(row.confirmed is True for row in rows),
        "not confirmed": sum(row.confirmed is False for row in rows),
        "without numbers": sum(row.confirmed is None for row in rows),
    }


def to_json(rows: Sequence[Row]) -> str:
    """The rows and their counts."""
    document: dict[str, Any] = {"counts": counts(rows), "rows": [row.to_dict() for row in rows]}
    return json.dumps(document, indent=2, allow_nan=False)


def to_html(rows: Sequence[Row]) -> str:
    """One page that needs nothing else."""
    total = ", ".join(f"{number} {name}" for name, number in counts(rows).items())
    sections = []
    for paper in dict.fromkeys(row.finding.paper for row in rows):
        body = "\n".join(_line(row) for row in rows if row.finding.paper == paper)
        head = "".join(f"<th>{name}</th>" for name in ("claim", "printed", "verdict", "corrected", "evidence of this run"))
        sections.append(f"<h2>[{paper}]</h2>\n<table>\n<tr>{head}</tr>\n{body}\n</table>")
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>wellposed audit</title>\n'
        f"<style>{STYLE}</style>\n<h1>Audit of the papers</h1>\n<p>{html.escape(total)}.</p>\n"
        + "\n".join(sections)
        + "\n</html>\n"
    )


def _line(row: Row) -> str:
    finding = row.finding
    cells = [_cell(text) for text in (finding.claim, finding.printed, finding.verdict, finding.corrected)]
    state = {True: "yes", False: "no", None: "none"}[row.confirmed]
    return f'<tr class="{state}">{"".join(cells)}<td class="evidence">{_facts(row)}</td></tr>'


def _facts(row: Row) -> str:
    if row.finding.check is None:
        return html.escape(row.finding.by)
    lines: Iterable[str] = (
        f'<div class="{fact.role}{"" if fact.holds else " false"}">{ROLES[fact.role]}: {html.escape(str(fact))}</div>'
        for fact in row.evidence.facts
    )
    return "".join(lines)


def _cell(text: str) -> str:
    return f"<td>{html.escape(text)}</td>"
