"""wellposed bench."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from wellposed.errors import InvalidArgument
from wellposed_lab.cli._app import ExitCode, app, guarded

__all__ = ["bench"]

EPILOG = (
    "[bold]Examples[/]\n\n  wellposed bench\n\n  wellposed bench --full\n\n  wellposed bench -- --only smoothing --rounds 5"
)


@app.command(epilog=EPILOG)
@guarded
def bench(
    options: Annotated[list[str] | None, typer.Argument(help="Options of benchmarks/run.py, after --.")] = None,
    full: Annotated[
        bool, typer.Option("--full", help="All problems and all rounds, not three rounds of two problems.")
    ] = False,
) -> None:
    """Time a solve and its gradient against the peers and the floor; needs the source checkout."""
    script = _script()
    words = [sys.executable, str(script), *([] if full else ["--quick"]), *(options or [])]
    code = subprocess.run(words, cwd=script.parent.parent, check=False).returncode
    if code:
        raise typer.Exit(ExitCode.NEGATIVE if code > 0 else code)


def _script() -> Path:
    """benchmarks/run.py of the checkout that this package is in, or of the working directory."""
    places = [Path(__file__).parents[3] / "benchmarks" / "run.py", Path.cwd() / "benchmarks" / "run.py"]
    for place in places:
        if place.is_file():
            return place
    raise InvalidArgument(
        "The benchmarks are not part of the installed package: get the source checkout and call this in it, or `make bench`."
    )
