"""The audit: checks every finding about the papers now; as JSON, HTML, and docs/findings.md.

`python -m wellposed_lab.papers.audit docs/findings.md` writes the tables of that page anew.
"""

from __future__ import annotations

import html
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from wellposed.errors import InvalidArgument, did_you_mean
from wellposed_lab.papers.findings import ROLES, AuditFinding, AuditRow, Evidence, Fact, PaperAudit
from wellposed_lab.papers.gao2022 import audit as gao2022
from wellposed_lab.papers.gao2023 import audit as gao2023
from wellposed_lab.papers.gao2023 import audit_generalization as gao2023_generalization
from wellposed_lab.papers.ling2022 import audit as ling2022
from wellposed_lab.papers.nguyen2022 import audit_kernel, audit_training
from wellposed_lab.papers.xie2021 import audit as xie2021

__all__ = ["FINDINGS", "AuditFinding", "AuditRow", "Evidence", "Fact", "audit", "counts", "to_html", "to_json", "to_markdown"]

#: By key, in the order of the page.
AUDITS = {
    "nguyen2022": PaperAudit("nguyen2022", (audit_kernel, audit_training)),
    "xie2021": PaperAudit("xie2021", (xie2021,)),
    "ling2022": PaperAudit("ling2022", (ling2022,)),
    "gao2022": PaperAudit("gao2022", (gao2022,)),
    "gao2023": PaperAudit("gao2023", (gao2023, gao2023_generalization)),
}
PAPERS = tuple(AUDITS)
#: What differs from the print comes first, then what holds.
FINDINGS: tuple[AuditFinding, ...] = tuple(
    finding
    for holding in (False, True)
    for paper in AUDITS.values()
    for finding in paper.findings
    if (finding.verdict == "holds") is holding
)
#: Where the generated part of docs/findings.md begins.
MARKER = "<!-- Generated from src/wellposed_lab/papers/*/findings.md by `make findings`: edit those, not what follows. -->\n"
COLUMNS = ("claim", "printed", "verdict", "corrected")
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 90rem; padding: 0 1rem; color: #1b1b1b; }
table { border-collapse: collapse; width: 100%; table-layout: fixed; overflow-wrap: anywhere; }
th:nth-child(1), th:nth-child(3) { width: 12%; } th:nth-child(5) { width: 36%; }
th, td { text-align: left; vertical-align: top; padding: .45rem .6rem; border-bottom: 1px solid #ddd; }
th { position: sticky; top: 0; background: #fff; }
td.evidence { font-size: 13px; } .printed { color: #9a3412; } .corrected { color: #166534; } .given { color: #555; }
tr.no td { background: #fee2e2; } .false { font-weight: bold; text-decoration: underline; }
"""


def audit(
    papers: Iterable[str] = (), *, listener: Callable[[AuditFinding], None] | None = None, differing: bool = False
) -> list[AuditRow]:
    """Runs the checks and returns the rows of the table, paper by paper.

    Args:
        papers: Keys; all if none is given.
        listener: Called with each finding before its check runs.
        differing: Omit what holds as printed.
    """
    chosen = tuple(papers) or PAPERS
    for key in chosen:
        if key not in PAPERS:
            raise InvalidArgument(f"Unknown paper {key!r}; known are {', '.join(PAPERS)}.{did_you_mean(key, PAPERS)}")
    rows = []
    for finding in sorted(FINDINGS, key=lambda finding: PAPERS.index(finding.paper)):
        if finding.paper in chosen and not (differing and finding.verdict == "holds"):
            if listener is not None:
                listener(finding)
            rows.append(finding.run())
    return rows


def counts(rows: Sequence[AuditRow]) -> dict[str, int]:
    """How many rows there are, and how many the numbers of this run confirm."""
    return {
        "rows": len(rows),
        "differ from the print": sum(row.finding.verdict != "holds" for row in rows),
        "confirmed": sum(row.confirmed is True for row in rows),
        "not confirmed": sum(row.confirmed is False for row in rows),
        "without numbers": sum(row.confirmed is None for row in rows),
    }


def to_json(rows: Sequence[AuditRow]) -> str:
    """The rows and their counts."""
    document: dict[str, Any] = {"counts": counts(rows), "rows": [row.to_dict() for row in rows]}
    return json.dumps(document, indent=2, allow_nan=False)


def to_html(rows: Sequence[AuditRow]) -> str:
    """One page that needs nothing else."""
    total = ", ".join(f"{number} {name}" for name, number in counts(rows).items())
    head = "".join(f"<th>{name}</th>" for name in (*COLUMNS, "evidence of this run"))
    sections = []
    for paper in dict.fromkeys(row.finding.paper for row in rows):
        body = "\n".join(_line(row) for row in rows if row.finding.paper == paper)
        sections.append(f"<h2>[{paper}]</h2>\n<table>\n<tr>{head}</tr>\n{body}\n</table>")
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>wellposed audit</title>\n'
        f"<style>{STYLE}</style>\n<h1>Audit of the papers</h1>\n<p>{html.escape(total)}.</p>\n"
        + "\n".join(sections)
        + "\n</html>\n"
    )


def _line(row: AuditRow) -> str:
    cells = "".join(f"<td>{html.escape(getattr(row.finding, column))}</td>" for column in COLUMNS)
    state = {True: "yes", False: "no", None: "none"}[row.confirmed]
    facts = "".join(
        f'<div class="{fact.role}{"" if fact.holds else " false"}">{ROLES[fact.role]}: {html.escape(str(fact))}</div>'
        for fact in row.evidence.facts
    )
    return f'<tr class="{state}">{cells}<td class="evidence">{facts or html.escape(row.finding.by)}</td></tr>'


def to_markdown() -> str:
    """The sections of docs/findings.md: what differs from the print. Runs no check."""
    sections = []
    for paper in AUDITS.values():
        before, _, table = paper.text.partition("\n|")
        lines = [line for line in f"|{table}".splitlines() if "| holds |" not in line]
        paths = [module.__name__.replace(".", "/") + ".py" for module in paper.modules]
        links = ",\n".join(f"[`{Path(path).name}`](../src/{path})" for path in paths)
        sections.append(f"#{before.rstrip()}\n\nChecks:\n{links}.\n\n" + "\n".join(lines) + "\n")
    return "\n".join(sections)


def main(path: str) -> None:
    """Writes the generated part of the page of findings anew."""
    page = Path(path)
    head, marker, _ = page.read_text(encoding="utf-8").partition(MARKER)
    if not marker:
        raise InvalidArgument(f"{path} has no line {MARKER.strip()!r}, below which the tables are written.")
    page.write_text(f"{head}{MARKER}\n{to_markdown()}", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
