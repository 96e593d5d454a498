"""wellposed certify."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from wellposed.certify import Certificate
from wellposed.certify._certificate_table import short
from wellposed.errors import InvalidArgument
from wellposed_lab.cli._app import (
    ALLOW_CODE,
    ExitCode,
    app,
    guarded,
    message_console,
    print_labelled,
    print_plain,
    print_wrapped,
    result_console,
)
from wellposed_lab.runs.config import read
from wellposed_lab.runs.epoch_logger import certificate_of
from wellposed_lab.runs.processes import on_threads, threads_for
from wellposed_lab.runs.setup import RunProblem, prepare
from wellposed_lab.runs.training import load_run

__all__ = ["certify"]

EPILOG = (
    "[bold]Examples[/]\n\n"
    "  wellposed certify runs/first\n\n"
    "  wellposed certify runs/first --theorem radius --json > certificate.json\n\n"
    "  wellposed certify config.yaml --set model.width=1024\n\n"
    "The exit code is 0 if and only if the verdict is CERTIFIED; 1 if it is not."
)


#: Where the hypotheses begin, beside their verdicts.
INDENT = 11


@app.command(epilog=EPILOG)
@guarded
def certify(
    source: Annotated[Path, typer.Argument(metavar="RUN_OR_CONFIG", help="A run directory, or a YAML file (at its start).")],
    theorem: Annotated[
        str, typer.Option("--theorem", help="auto, radius, ling2022, nguyen2022, gao2022, contraction, ...")
    ] = "auto",
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a key of a configuration.")
    ] = None,
    at: Annotated[str, typer.Option("--at", help="last or best: which checkpoint of a run.")] = "last",
    as_json: Annotated[bool, typer.Option("--json", help="Print the certificate as JSON.")] = False,
    allow_code: Annotated[bool, typer.Option("--allow-code", help=ALLOW_CODE)] = False,
) -> None:
    """Check what is proved about a network at its present parameters."""
    with message_console().status("certifying"):
        problem, where = _problem(source, list(changes or []), at, allow_code)
        certificate = _certificate(problem, theorem)
    if as_json:
        typer.echo(json.dumps({"at": where, **certificate.to_dict()}, indent=2))
    else:
        print_wrapped(f"{source}, {where}\n")
        _show(certificate)
    if not certificate.certified:
        raise typer.Exit(ExitCode.NEGATIVE)


def _problem(source: Path, changes: list[str], at: str, allow_code: bool) -> tuple[RunProblem, str]:
    if at not in ("last", "best"):
        raise InvalidArgument(f"--at must be last or best; got {at!r}.")
    if source.is_file():
        return prepare(read(source, changes), allow_code=allow_code), "at the start"
    if changes:
        raise InvalidArgument("--set changes a configuration; a run stays what it was. Give its config.yaml instead.")
    _, problem, checkpoint = load_run(source, at=at, allow_code=allow_code)
    return problem, "at the start" if checkpoint is None else f"after epoch {checkpoint.epoch}"


def _certificate(problem: RunProblem, theorem: str) -> Certificate:
    X, y = problem.parts.train
    with on_threads(threads_for(problem.model, X)):
        certificate = certificate_of(problem.model, X, y, theorem)
    if certificate is None:
        raise InvalidArgument(f"There is no certificate for {type(problem.model).__name__} by theorem={theorem!r}.")
    return certificate


def _show(certificate: Certificate) -> None:
    """`str(certificate)`; a table wider than the terminal is printed row below row."""
    lines, count = str(certificate).split("\n"), len(certificate.hypotheses)
    start = next((i for i, line in enumerate(lines) if line.startswith("hypothesis ")), len(lines))
    before, table, after = lines[:start], lines[start : start + count + 2], lines[start + count + 2 :]
    for line in before:
        print_wrapped(line)
    if all(len(line) <= result_console().width for line in table):
        for line in table:
            print_plain(line)
    else:
        for part in certificate.hypotheses:
            holds = {True: "holds", False: "fails", None: "undecided"}[part.holds]
            print_labelled(f"{holds}:", part.name, indent=INDENT)
            note = f" ({part.note})" if part.note else ""
            print_labelled("", f"{short(part.value)} {part.relation} {short(part.bound)} {part.equation}{note}", indent=INDENT)
    for line in after:
        print_wrapped(line)
