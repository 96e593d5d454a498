"""wellposed audit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wellposed.errors import InvalidArgument
from wellposed_lab.cli._app import ExitCode, app, guarded, out, say
from wellposed_lab.cli._layout import print_labelled, print_wrapped
from wellposed_lab.papers.audit import AuditFinding, AuditRow, counts, to_html, to_json
from wellposed_lab.papers.audit import audit as run_audit

__all__ = ["audit"]

EPILOG = (
    "[bold]Examples[/]\n\n"
    "  wellposed audit\n\n"
    "  wellposed audit ling2022 --differing\n\n"
    "  wellposed audit --json > audit.json\n\n"
    "  wellposed audit --html audit.html\n\n"
    "The exit code is 0 if the numbers of this run bear every verdict out; 1 if they do not."
)


#: Where the texts begin.
INDENT = 13


@app.command(epilog=EPILOG)
@guarded
def audit(
    papers: Annotated[list[str] | None, typer.Argument(help="Keys such as ling2022; all if none is given.")] = None,
    differing: Annotated[bool, typer.Option("--differing", help="Leave out what holds as printed.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
    page: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write the table as a web page.")] = None,
) -> None:
    """Check the claims of the papers with numbers, and print what holds, what does not, and the corrected form."""
    with say().status("checking") as status:

        def tell(finding: AuditFinding) -> None:
            status.update(f"checking {finding.paper}: {finding.claim}")

        rows = run_audit(list(papers or []), listener=tell, differing=differing)
    if page is not None:
        try:
            page.write_text(to_html(rows), encoding="utf-8")
        except OSError as error:
            raise InvalidArgument(f"--html {page} cannot be written: {error.strerror}.") from None
    if as_json:
        typer.echo(to_json(rows))
    elif page is None:
        _print(rows)
    else:
        out().print(f"{page}: {_summary(rows)}", highlight=False, markup=False)
    if any(row.confirmed is False for row in rows):
        raise typer.Exit(ExitCode.NEGATIVE)


def _print(rows: list[AuditRow]) -> None:
    """Below each other and not in columns: sentences and formulas of five columns would be a few letters wide."""
    console = out()
    for paper in dict.fromkeys(row.finding.paper for row in rows):
        console.print(f"[{paper}]", style="bold", highlight=False, markup=False)
        for row in rows:
            finding = row.finding
            if finding.paper != paper:
                continue
            evidence = finding.by if finding.check is None else str(row.evidence)
            console.print(
                f"\n{finding.claim}", style="red" if row.confirmed is False else "bold", highlight=False, markup=False
            )
            cells = {
                "printed": finding.printed,
                "verdict": finding.verdict,
                "corrected": finding.corrected,
                "this run": evidence,
            }
            for label, text in cells.items():
                if text:
                    print_labelled(f"  {label}", text, indent=INDENT, style="dim", console=console)
        console.print()
    print_wrapped(_summary(rows))


def _summary(rows: list[AuditRow]) -> str:
    seconds = sum(row.seconds for row in rows)
    return ", ".join(f"{number} {name}" for name, number in counts(rows).items()) + f"; {seconds:.1f} s."
