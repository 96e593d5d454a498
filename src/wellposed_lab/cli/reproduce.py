"""wellposed reproduce."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from wellposed.errors import InvalidArgument
from wellposed_lab.cli._app import ExitCode, app, guarded, out, say
from wellposed_lab.cli._layout import print_labelled, print_wrapped
from wellposed_lab.papers import EXPERIMENTS, Check, ClaimOutcome, Record, Result, changes_of, choose
from wellposed_lab.papers import reproduce as run_experiment
from wellposed_lab.papers.run import why_no_figure

__all__ = ["reproduce"]

EPILOG = (
    "[bold]Examples[/]\n\n"
    "  wellposed reproduce --list\n\n"
    "  WELLPOSED_DATA=~/data wellposed reproduce\n\n"
    "  wellposed reproduce ling2022/figure1 xie2021\n\n"
    "  wellposed reproduce gao2022/figure1 --set widths=50,100,200 --set seeds=0,1,2,3,4\n\n"
    "  wellposed reproduce ling2022/figure1 --full --dask tcp://10.0.0.1:8786\n\n"
    "Started again with the same options it continues where it was interrupted. Exit code 1: a claim of a paper was not "
    "reproduced; questions that the papers do not ask (ours) are shown apart and do not count."
)
COLORS = {ClaimOutcome.REPRODUCED: "green", ClaimOutcome.NOT_REPRODUCED: "red", ClaimOutcome.NOT_TESTED: "yellow"}
#: Where the texts beside the verdicts begin.
INDENT = 15
SECONDS_BETWEEN_LINES = 5.0


@app.command(epilog=EPILOG)
@guarded
def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Experiments such as ling2022/figure1, papers such as ling2022, or all."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick/--full", help="Minutes, or the sizes of the paper.")] = True,
    settings: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a size.")] = None,
    folder: Annotated[Path, typer.Option("--out", help="Where records, figures and finished tasks go.")] = Path("reproduced"),
    jobs: Annotated[int, typer.Option("--jobs", help="Processes; -1 for one a core.")] = -1,
    dask: Annotated[str | None, typer.Option("--dask", help="Address of a Dask scheduler to use instead.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure everything again.")] = False,
    figure: Annotated[bool, typer.Option("--figure/--no-figure", help="Draw figure.png.")] = True,
    listing: Annotated[bool, typer.Option("--list", help="Show the experiments and their claims, and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the record as JSON; a list of several.")] = False,
) -> None:
    """Run experiments of the papers, all if none is named, and say which claims are reproduced, with numbers."""
    if listing:
        _list(as_json=as_json)
        return
    if not names and not quick:
        raise InvalidArgument(
            "The sizes of the papers take hours to days: name experiments, such as ling2022/figure1 (`--list` shows them), or "
            "say `wellposed reproduce all --full`."
        )
    chosen, size, changes = choose(names or ["all"]), "quick" if quick else "full", changes_of(settings or [])
    for experiment in chosen:  # mistakes before anything is measured
        getattr(experiment, size).changed(changes)
    if figure and (missing := why_no_figure()) is not None:
        say().print(missing, highlight=False, markup=False)
        figure = False
    records = []
    for experiment in chosen:
        name = experiment.name
        with _watching(name) as listener:
            record = run_experiment(
                name, size, changes, out=folder, jobs=jobs, dask=dask, fresh=fresh, figure=figure, listener=listener
            )
        records.append(record)
        if not as_json:
            _show(record)
            where = folder.joinpath(*name.split("/"))
            files = f"{where / 'record.json'}" + (f", {where / 'figure.png'}" if figure else "")
            out().print(files, highlight=False, markup=False)
    if as_json:
        one = len(records) == 1
        typer.echo(records[0].to_json() if one else json.dumps([json.loads(record.to_json()) for record in records], indent=1))
    elif len(records) > 1:
        print_wrapped(_summary(records))
    if any(record.count(ClaimOutcome.NOT_REPRODUCED) for record in records):
        raise typer.Exit(ExitCode.NEGATIVE)


def _summary(records: list[Record]) -> str:
    counts = ", ".join(f"{sum(record.count(outcome) for record in records)} {outcome.value}" for outcome in ClaimOutcome)
    own = [record.count(outcome, ours=True) for record in records for outcome in ClaimOutcome]
    apart = f" Questions of ours, which do not count: {sum(own)}." if sum(own) else ""
    return (
        f"{len(records)} experiments, {sum(record.seconds for record in records):.0f} s; claims of the papers: {counts}.{apart}"
    )


def _show(record: Record) -> None:
    cached = sum(result.cached for result in record.results)
    kept = f", {cached} of them kept from before" if cached else ""
    facts = f"({record.size}; {len(record.results)} tasks{kept}; {record.seconds:.0f} s)"
    print_wrapped(f"{record.experiment} {record.title} {facts}", style="bold")
    for check in record.checks:
        if not check.claim.ours:
            _show_check(check)
    own = [check for check in record.checks if check.claim.ours]
    if own:
        print_wrapped("Not asked in the paper, and not part of the exit code:")
    for check in own:
        _show_check(check)
    for note in record.notes:
        print_labelled("note", note, indent=INDENT, style="dim")


def _show_check(check: Check) -> None:
    claim, finding = check.claim, check.finding
    print_labelled(check.outcome.value, f"{claim.text} {claim.source}", indent=INDENT, style=COLORS[check.outcome])
    print_labelled("", f"measured: {finding.measured}", indent=INDENT)
    print_labelled("", f"decided by: {claim.decided_by}", indent=INDENT)


def _list(*, as_json: bool) -> None:
    if as_json:
        rows = [{"name": e.name, "title": e.title, "claims": [vars(claim) for claim in e.claims]} for e in EXPERIMENTS.values()]
        typer.echo(json.dumps(rows, indent=2))
        return
    for experiment in EXPERIMENTS.values():
        print_wrapped(f"{experiment.name} {experiment.title}", style="bold")
        for claim in experiment.claims:
            print_labelled("  -", f"{claim.text} {claim.source}", indent=4)


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
