"""wellposed certify."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from wellposed.certify import Certificate
from wellposed.cli._app import ExitCode, app, guarded, out, say
from wellposed.errors import InvalidArgument
from wellposed.experiments.setup import Problem, prepare
from wellposed.experiments.training import load_run
from wellposed.train.certificates import certificate_of, has_certificate
from wellposed.train.config import read

__all__ = ["certify"]

EPILOG = (
    "[bold]Examples[/]\n\n"
    "  wellposed certify runs/first\n\n"
    "  wellposed certify runs/first --theorem radius --json > certificate.json\n\n"
    "  wellposed certify config.yaml --set model.width=1024\n\n"
    "The exit code is 0 if and only if the verdict is CERTIFIED; 1 if it is not."
)


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
) -> None:
    """Check what is proved about a network at its present parameters."""
    with say().status("certifying"):
        problem, where = _problem(source, list(changes or []), at)
        certificate = _certificate(problem, theorem)
    if as_json:
        typer.echo(json.dumps({"at": where, **certificate.to_dict()}, indent=2))
    else:
        out().print(f"{source}, {where}\n\n{certificate}", highlight=False, markup=False)
    if not certificate.certified:
        raise typer.Exit(ExitCode.NEGATIVE)


def _problem(source: Path, changes: list[str], at: str) -> tuple[Problem, str]:
    if at not in ("last", "best"):
        raise InvalidArgument(f"--at must be last or best; got {at!r}.")
    if source.is_file():
        return prepare(read(source, changes)), "at the start"
    if changes:
        raise InvalidArgument("--set changes a configuration; a run stays what it was. Give its config.yaml instead.")
    _, problem, checkpoint = load_run(source, at=at)
    return problem, "at the start" if checkpoint is None else f"after epoch {checkpoint.epoch}"


def _certificate(problem: Problem, theorem: str) -> Certificate:
    if not has_certificate(problem.model):
        raise InvalidArgument(f"There is no certificate for {type(problem.model).__name__}.")
    X, y = problem.parts.train
    return certificate_of(problem.model, X, y, theorem=theorem)
