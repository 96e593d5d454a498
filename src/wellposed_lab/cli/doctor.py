"""wellposed doctor."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from wellposed_lab.cli._app import ExitCode, app, guarded, print_plain, print_table
from wellposed_lab.doctor import examine

__all__ = ["doctor"]

EPILOG = (
    "[bold]Examples[/]\n\n"
    "  wellposed doctor\n\n"
    "  wellposed doctor --json > installation.json\n\n"
    "The exit code is 1 if something is wrong, so that answers are not to be trusted."
)
STYLES = {"good": "green", "note": "yellow", "wrong": "bold red"}


@app.command(epilog=EPILOG)
@guarded
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Check the installation: versions, threads, arithmetic, GPU, extras and data."""
    findings = examine()
    wrong = [finding for finding in findings if finding.level == "wrong"]
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        table = Table("check", "", "found, and what to do")
        for finding in findings:
            level = f"[{STYLES[finding.level]}]{finding.level}[/]"
            text = f"{finding.found}. {finding.advice}" if finding.advice else finding.found
            table.add_row(finding.name, level, escape(text))
        print_table(table)
        print_plain(f"{len(wrong)} wrong: {', '.join(finding.name for finding in wrong)}" if wrong else "Nothing is wrong.")
    if wrong:
        raise typer.Exit(ExitCode.NEGATIVE)
