"""wellposed report."""

from __future__ import annotations

import json
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from wellposed.errors import how_to_install
from wellposed_lab.cli._app import app, guarded, message_console, print_message, print_plain
from wellposed_lab.report import can_draw, compare, write

__all__ = ["report"]

EPILOG = (
    "[bold]Examples[/]\n\n"
    "  wellposed report runs/first\n\n"
    "  wellposed report runs/first --open\n\n"
    "  wellposed report runs/first runs/second --out comparison.html\n\n"
    "The page is one file that needs no network; it can be mailed, archived and printed."
)


@app.command(epilog=EPILOG)
@guarded
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run directories; several are compared.")],
    path: Annotated[
        Path | None,
        typer.Option("--out", help="The file; report.html in the run directory, or comparison.html here, if not given."),
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="Open it in the browser.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the path as JSON.")] = False,
) -> None:
    """Write an HTML page about a run, or a comparison of several, and print its path."""
    with message_console().status("writing the page"):
        page = write(runs[0], path) if len(runs) == 1 else compare(runs, path or Path("comparison.html"))
    if not can_draw():
        install = how_to_install("report")
        print_message(f"The page has tables in place of figures: plotly is missing. Install it with: {install}.")
    if as_json:
        typer.echo(json.dumps({"report": str(page)}))
    else:
        print_plain(str(page))
    if show and not webbrowser.open(page.resolve().as_uri()):
        print_message(f"No browser could be opened; open {page} by hand.")
