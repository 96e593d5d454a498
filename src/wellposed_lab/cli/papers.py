"""wellposed reproduce, wellposed audit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from wellposed._progress import progress_display
from wellposed.errors import InvalidArgument
from wellposed.plot._files import FORMATS
from wellposed_lab.cli._app import (
    ExitCode,
    app,
    guarded,
    message_console,
    print_labelled,
    print_message,
    print_plain,
    print_wrapped,
)
from wellposed_lab.papers import EXPERIMENTS, ClaimCheck, ClaimOutcome, Record, changes_of, choose
from wellposed_lab.papers import reproduce as run_experiment
from wellposed_lab.papers.audit import AuditFinding, AuditRow, counts, to_html, to_json
from wellposed_lab.papers.audit import audit as run_audit
from wellposed_lab.papers.records import SAME, compare
from wellposed_lab.papers.run import prepare, why_no_figure

__all__ = ["audit", "reproduce"]

REPRODUCE_EPILOG = (
    "[bold]Examples[/]\n\n"
    "  wellposed reproduce --list\n\n"
    "  WELLPOSED_DATA=~/data wellposed reproduce\n\n"
    "  wellposed reproduce ling2022/figure1 xie2021\n\n"
    "  wellposed reproduce gao2022/figure1 --set widths=50,100,200 --set seeds=0,1,2,3,4\n\n"
    "  wellposed reproduce ling2022/figure1 --full --dask tcp://10.0.0.1:8786\n\n"
    "Started again with the same options it continues where it was interrupted. Exit code 1: a claim of a paper was not "
    "reproduced; questions that the papers do not ask (ours) are shown apart and do not count."
)
AUDIT_EPILOG = (
    "[bold]Examples[/]\n\n"
    "  wellposed audit\n\n"
    "  wellposed audit ling2022 --differing\n\n"
    "  wellposed audit --json > audit.json\n\n"
    "  wellposed audit --html audit.html\n\n"
    "The exit code is 0 if the numbers of this run bear every verdict out; 1 if they do not."
)
COLORS = {ClaimOutcome.REPRODUCED: "green", ClaimOutcome.NOT_REPRODUCED: "red", ClaimOutcome.NOT_TESTED: "yellow"}
#: Columns at which the texts begin beside the verdicts of claims, and beside the labels of an audit.
CLAIM_INDENT, AUDIT_INDENT = 15, 13
LINE = "{title}: {done:g} of {total:g} tasks"


@app.command(epilog=REPRODUCE_EPILOG)
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
    figure: Annotated[bool, typer.Option("--figure/--no-figure", help="Draw figure.png, figure.pdf and figure.svg.")] = True,
    listing: Annotated[bool, typer.Option("--list", help="Show the experiments and their claims, and exit.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the record as JSON; a list of several.")] = False,
    records_folder: Annotated[Path, typer.Option("--records", help="Records for --compare and --store.")] = Path("records"),
    comparing: Annotated[bool, typer.Option("--compare", help="Run the shortest task of a record anew, and compare.")] = False,
    store_record: Annotated[bool, typer.Option("--store", help="Extend the record in --records by what is missing.")] = False,
) -> None:
    """Run experiments of the papers, all if none is named, and show which claims are reproduced."""
    if listing:
        _list(as_json=as_json)
        return
    if not names and not quick:
        raise InvalidArgument(
            "The sizes of the papers take hours to days: name experiments, such as ling2022/figure1 (`--list` shows them), or "
            "say `wellposed reproduce all --full`."
        )
    if comparing:
        _compare([experiment.name for experiment in choose(names or [])], records_folder, as_json=as_json)
        return
    chosen, size, changes = choose(names or ["all"]), "quick" if quick else "full", changes_of(settings or [])
    records_kept = records_folder if store_record else None
    for experiment in chosen:  # mistakes and missing data before anything is measured
        prepare(experiment.name, size, changes, records=records_kept, fresh=fresh)
    if figure and (missing := why_no_figure()) is not None:
        print_message(missing)
        figure = False
    records = []
    for experiment in chosen:
        name = experiment.name
        with progress_display(name, line=LINE, bar="{done:.0f}/{total:.0f}", ends=False) as display:
            record = run_experiment(
                name,
                size,
                changes,
                out=folder,
                jobs=jobs,
                dask=dask,
                fresh=fresh,
                records=records_kept,
                figure=figure,
                listener=lambda done, total, latest: display.update(done, total=total),  # noqa: B023 (used at once)
            )
        records.append(record)
        if not as_json:
            _show_record(record)
            where = folder.joinpath(*name.split("/"))
            files = ["record.json", *(f"figure{ending}" for ending in FORMATS if figure)]
            print_plain(", ".join(str(where / file) for file in files))
    if as_json:
        one = len(records) == 1
        typer.echo(records[0].to_json() if one else json.dumps([json.loads(record.to_json()) for record in records], indent=1))
    elif len(records) > 1:
        print_wrapped(_record_summary(records))
    if any(record.count(ClaimOutcome.NOT_REPRODUCED) for record in records):
        raise typer.Exit(ExitCode.NEGATIVE)


def _compare(names: list[str], folder: Path, *, as_json: bool) -> None:
    """Compares records; the exit code is 1 if one does not agree."""
    if not names:
        raise InvalidArgument("--compare needs the names of experiments, such as ling2022/figure1.")
    found = {name: compare(name, folder) for name in names}
    if as_json:
        rows = {name: {"task": one.task, "differences": one.differences, "agrees": one.agrees} for name, one in found.items()}
        typer.echo(json.dumps(rows, indent=1))
    else:
        for name, one in found.items():
            verdict = "agrees with the record" if one.agrees else "DIFFERS from the record"
            key, worst = max(one.differences.items(), key=lambda item: item[1])
            print_wrapped(
                f"{name}: {verdict}; greatest relative difference {worst:.2g} ({key}, up to {SAME:g} is the same), of its "
                f"shortest task, {one.task}, in {one.seconds[0]:.0f} CPU seconds (recorded: {one.seconds[1]:.0f})"
            )
    if not all(one.agrees for one in found.values()):
        raise typer.Exit(ExitCode.NEGATIVE)


def _record_summary(records: list[Record]) -> str:
    counts = ", ".join(f"{sum(record.count(outcome) for record in records)} {outcome.value}" for outcome in ClaimOutcome)
    own = [record.count(outcome, ours=True) for record in records for outcome in ClaimOutcome]
    apart = f" Questions of ours, which do not count: {sum(own)}." if sum(own) else ""
    return (
        f"{len(records)} experiments, {sum(record.seconds for record in records):.0f} s; claims of the papers: {counts}.{apart}"
    )


def _show_record(record: Record) -> None:
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
        print_labelled("note", note, indent=CLAIM_INDENT, style="dim")
    for departure in record.departures:
        print_labelled("departure", departure, indent=CLAIM_INDENT, style="dim")


def _show_check(check: ClaimCheck) -> None:
    claim, finding = check.claim, check.finding
    print_labelled(check.outcome.value, f"{claim.text} {claim.source}", indent=CLAIM_INDENT, style=COLORS[check.outcome])
    print_labelled("", f"measured: {finding.measured}", indent=CLAIM_INDENT)
    print_labelled("", f"decided by: {claim.decided_by}", indent=CLAIM_INDENT)


def _list(*, as_json: bool) -> None:
    if as_json:
        rows = [{"name": e.name, "title": e.title, "claims": [vars(claim) for claim in e.claims]} for e in EXPERIMENTS.values()]
        typer.echo(json.dumps(rows, indent=2))
        return
    for experiment in EXPERIMENTS.values():
        print_wrapped(f"{experiment.name} {experiment.title}", style="bold")
        for claim in experiment.claims:
            print_labelled("  -", f"{claim.text} {claim.source}", indent=4)


@app.command(epilog=AUDIT_EPILOG)
@guarded
def audit(
    papers: Annotated[list[str] | None, typer.Argument(help="Keys such as ling2022; all if none is given.")] = None,
    differing: Annotated[bool, typer.Option("--differing", help="Omit what holds as printed.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
    page: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write the table as a web page.")] = None,
) -> None:
    """Check the claims of the papers with numbers; print what holds and what must be corrected."""
    with message_console().status("checking") as status:

        def show(finding: AuditFinding) -> None:
            status.update(f"checking {finding.paper}: {finding.claim}")

        rows = run_audit(list(papers or []), listener=show, differing=differing)
    if page is not None:
        try:
            page.write_text(to_html(rows), encoding="utf-8")
        except OSError as error:
            raise InvalidArgument(f"--html {page} cannot be written: {error.strerror}.") from None
    if as_json:
        typer.echo(to_json(rows))
    elif page is None:
        _show_audit(rows)
    else:
        print_plain(f"{page}: {_audit_summary(rows)}")
    if any(row.confirmed is False for row in rows):
        raise typer.Exit(ExitCode.NEGATIVE)


def _show_audit(rows: list[AuditRow]) -> None:
    """Row below row: five columns of sentences and formulas would be a few letters wide."""
    for paper in dict.fromkeys(row.finding.paper for row in rows):
        print_plain(f"[{paper}]", style="bold")
        for row in rows:
            finding = row.finding
            if finding.paper != paper:
                continue
            evidence = finding.by if finding.check is None else str(row.evidence)
            print_plain(f"\n{finding.claim}", style="red" if row.confirmed is False else "bold")
            cells = {
                "printed": finding.printed,
                "verdict": finding.verdict,
                "corrected": finding.corrected,
                "this run": evidence,
            }
            for label, text in cells.items():
                if text:
                    print_labelled(f"  {label}", text, indent=AUDIT_INDENT, style="dim")
        print_plain("")
    print_wrapped(_audit_summary(rows))


def _audit_summary(rows: list[AuditRow]) -> str:
    seconds = sum(row.seconds for row in rows)
    return ", ".join(f"{number} {name}" for name, number in counts(rows).items()) + f"; {seconds:.1f} s."
