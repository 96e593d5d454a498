"""wellposed reproduce."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from wellposed.cli._app import ExitCode, app, guarded, out, say
from wellposed.errors import InvalidArgument
from wellposed.experiments import EXPERIMENTS, Outcome, Record, Result, changes_of, find
from wellposed.experiments import reproduce as run_experiment

__all__ = ["reproduce"]

EPILOG = (
    "[bold]Examples[/]\n\n"
    "  wellposed reproduce --list\n\n"
    "  WELLPOSED_DATA=~/data wellposed reproduce ling2022/figure1\n\n"
    "  wellposed reproduce gao2022/figure1 --set widths=50,100,200 --set seeds=0,1,2,3,4\n\n"
    "  wellposed reproduce ling2022/figure1 --full --dask tcp://10.0.0.1:8786\n\n"
    "Started again with the same options it goes on where it was interrupted. Exit code 1: a claim was not reproduced."
)
COLORS = {Outcome.REPRODUCED: "green", Outcome.NOT_REPRODUCED: "red", Outcome.NOT_TESTED: "yellow"}
SECONDS_BETWEEN_LINES = 5.0


@app.command(epilog=EPILOG)
@guarded
def reproduce(
    name: Annotated[str | None, typer.Argument(help="Such as ling2022/figure1; see --list.")] = None,
    quick: Annotated[bool, typer.Option("--quick/--full", help="Minutes, or the sizes of the paper.")] = True,
    settings: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a size.")] = None,
    folder: Annotated[Path, typer.Option("--out", help="Where records, figures and finished tasks go.")] = Path("reproduced"),
    jobs: Annotated[int, typer.Option("--jobs", help="Processes; -1 for one a core.")] = -1,
    dask: Annotated[str | None, typer.Option("--dask", help="Address of a Dask scheduler to use instead.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure everything again.")] = False,
    figure: Annotated[bool, typer.Option("--figure/--no-figure", help="Draw figure.png.")] = True,
    listing: Annotated[bool, typer.Option("--list", help="Show the experiments and their claims, and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the record as JSON.")] = False,
) -> None:
    """Run an experiment of a paper and say which of its claims are reproduced, with numbers."""
    if listing:
        _list(as_json=as_json)
        return
    if name is None:
        raise InvalidArgument("Name an experiment, such as ling2022/figure1; `wellposed reproduce --list` shows all.")
    find(name)  # an unknown name before anything is shown
    with _watching(name) as listener:
        record = run_experiment(
            name,
            "quick" if quick else "full",
            changes_of(settings or []),
            out=folder,
            jobs=jobs,
            dask=dask,
            fresh=fresh,
            figure=figure,
            listener=listener,
        )
    if as_json:
        typer.echo(record.to_json())
    else:
        _show(record)
        where = folder.joinpath(*name.split("/"))
        out().print(f"{where / 'record.json'}" + (f", {where / 'figure.png'}" if figure else ""), highlight=False, markup=False)
    if record.count(Outcome.NOT_REPRODUCED):
        raise typer.Exit(ExitCode.NEGATIVE)


def _show(record: Record) -> None:
    cached = sum(result.cached for result in record.results)
    kept = f", {cached} of them kept from before" if cached else ""
    console = out()
    facts = f"({record.size}; {len(record.results)} tasks{kept}; {record.seconds:.0f} s)"
    console.print(f"[bold]{record.experiment}[/] {escape(record.title)} {facts}", highlight=False)
    for check in record.checks:
        claim, finding = check.claim, check.finding
        verdict = f"[{COLORS[check.outcome]}]{check.outcome.value:<14}[/]"
        console.print(f"{verdict} {escape(claim.text)} {escape(claim.source)}", highlight=False)
        console.print(f"{'':<15}measured: {escape(finding.measured)}", highlight=False)
        console.print(f"{'':<15}decided by: {escape(claim.decided_by)}", highlight=False)
    for note in record.notes:
        console.print(f"note: {escape(note)}", highlight=False)


def _list(*, as_json: bool) -> None:
    if as_json:
        rows = [{"name": e.name, "title": e.title, "claims": [vars(claim) for claim in e.claims]} for e in EXPERIMENTS.values()]
        typer.echo(json.dumps(rows, indent=2))
        return
    for experiment in EXPERIMENTS.values():
        out().print(f"[bold]{experiment.name}[/] {escape(experiment.title)}", highlight=False)
        for claim in experiment.claims:
            out().print(f"  {escape(claim.text)} {escape(claim.source)}", highlight=False)


@contextmanager
def _watching(name: str) -> Iterator[Callable[[int, int, Result | None], None]]:
    """A bar on a terminal, a line now and then elsewhere; both on stderr."""
    console = say()
    if not console.is_terminal:
        yield _Lines(name)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(name, total=None)

        def update(done: int, total: int, latest: Result | None) -> None:
            bar.update(task, completed=done, total=total)

        yield update


class _Lines:
    def __init__(self, name: str) -> None:
        self._name, self._shown = name, time.monotonic()

    def __call__(self, done: int, total: int, latest: Result | None) -> None:
        if time.monotonic() - self._shown > SECONDS_BETWEEN_LINES:
            self._shown = time.monotonic()
            say().print(f"{self._name}: {done} of {total} tasks", highlight=False)
