"""wellposed data."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from wellposed.data import Dataset, load
from wellposed.data._load import NAMES
from wellposed.data.available import files_of, is_available, missing_files
from wellposed.data.files import FILES
from wellposed.data.restoration import IMAGES
from wellposed.data.text import TEXTS
from wellposed.errors import InvalidArgument, WellposedError, did_you_mean
from wellposed_lab.cli._app import ExitCode, app, guarded, message_console, print_plain, print_table

__all__ = ["check", "list_", "show"]

#: Whole numbers among the targets, at most so many, are shown as classes.
MOST_CLASSES = 20
EPILOG = (
    "[bold]Examples[/]\n\n"
    "  wellposed data list\n\n"
    "  wellposed data show digits --n 100 --classes 0,1\n\n"
    "  wellposed data show houses.csv --target price --columns rooms,age\n\n"
    "  WELLPOSED_DATA=~/data wellposed data check"
)

group = typer.Typer(
    help="Data sets: which there are, what is in them, whether the files are whole.", epilog=EPILOG, no_args_is_help=True
)
app.add_typer(group, name="data")

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@group.command("list", epilog="[bold]Example[/]\n\n  wellposed data list --json")
@guarded
def list_(as_json: AsJson = False) -> None:
    """Show the data sets and where they come from."""
    rows = [{"name": name, **_origin(name)} for name in NAMES]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    table = Table("name", "samples", "available", "from")
    for row in rows:
        folder, _, file = row["from"].rpartition(os.sep) if row["available"] else ("", "", row["from"])
        origin = f"{file} in $WELLPOSED_DATA" if folder else file
        table.add_row(row["name"], row["samples"], "yes" if row["available"] else "no", origin)
    print_table(table)


@group.command(epilog="[bold]Example[/]\n\n  wellposed data show mnist --n 1000 --classes 3,8 --paper ling2022")
@guarded
def show(
    name: Annotated[str, typer.Argument(help="Of the data set, or a .csv, .parquet, .npz or .txt file.")],
    n: Annotated[int | None, typer.Option("--n", help="Training samples; all if not given.")] = None,
    classes: Annotated[str | None, typer.Option("--classes", help="Such as 0,1.")] = None,
    paper: Annotated[str | None, typer.Option("--paper", help="Preprocessing of ling2022, gao2022 or gao2023.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the choice of samples.")] = 0,
    target: Annotated[str | None, typer.Option("--target", help="The column of a table to learn.")] = None,
    columns: Annotated[str | None, typer.Option("--columns", help="The columns to learn from, such as age,income.")] = None,
    as_json: AsJson = False,
) -> None:
    """Load a data set and show what is in it and how it was preprocessed."""
    with message_console().status(f"loading {name}"):
        inputs = None if columns is None else tuple(part.strip() for part in columns.split(","))
        data = load(name, n, _classes(classes), seed=seed, paper=paper, target=target, columns=inputs)
    facts = _facts(data)
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    print_plain(str(data))
    for part, numbers in facts["parts"].items():
        span = f"[{numbers['least']:.4g}, {numbers['largest']:.4g}]"
        print_plain(f"{part}: X {tuple(numbers['X'])} in {span}, targets {numbers['targets']}")


@group.command(epilog="[bold]Example[/]\n\n  wellposed data check mnist cifar10")
@guarded
def check(
    names: Annotated[list[str] | None, typer.Argument(help="Which; all whose files are there if not given.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check shapes, ranges and checksums of the files in $WELLPOSED_DATA."""
    folder = os.environ.get("WELLPOSED_DATA")
    if not folder:
        raise InvalidArgument("WELLPOSED_DATA is not set: set it to the folder with mnist.npz and the like.")
    known = (*FILES, *TEXTS)
    for name in names or []:
        if name not in known:
            raise InvalidArgument(f"{name!r} has no file; with files are {', '.join(known)}.{did_you_mean(name, known)}")
    chosen = list(names) if names else [name for name in known if is_available(name)]
    if not chosen:
        raise InvalidArgument(f"{folder} holds none of {', '.join(file for name in known for file in files_of(name))}.")
    rows = []
    with message_console().status("checking") as status:
        for name in chosen:
            status.update(f"checking {name}")
            rows.append({"name": name, **_checked(name)})
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    else:
        for row in rows:
            print_plain(f"{row['name']}: {'good' if row['good'] else 'WRONG'}, {row['says']}")
    if not all(row["good"] for row in rows):
        raise typer.Exit(ExitCode.NEGATIVE)


def _checked(name: str) -> dict[str, Any]:
    if missing := missing_files(name):
        return {"good": False, "says": f"{missing[0]} does not exist in {os.environ['WELLPOSED_DATA']}"}
    try:
        data = load(name)
    except WellposedError as error:
        return {"good": False, "says": str(error)}
    return {"good": True, "says": data.steps[0]}


def _origin(name: str) -> dict[str, Any]:
    available = is_available(name)
    if not files_of(name):
        drawn = name != "digits"
        samples = "any number" if drawn else "1797 of 8x8"
        return {"samples": samples, "available": available, "from": "drawn" if drawn else "scikit-learn"}
    if name == "deblurring":
        return {"samples": "64x64 and 160x160", "available": available, "from": f"{' and '.join(IMAGES)}, with blur and noise"}
    needed, folder = files_of(name), Path(os.environ.get("WELLPOSED_DATA", ""))
    if name in TEXTS:
        there = str(folder / name) if available else f"{' and '.join(needed)} in $WELLPOSED_DATA"
        return {"samples": "windows of tokens", "available": available, "from": there}
    shape, classes, remote = FILES[name]
    samples = f"{'x'.join(map(str, shape))}, {f'{classes} classes' if classes else 'no labels'}"
    if available:
        return {"samples": samples, "available": True, "from": str(folder / needed[0])}
    fetched = f", or OpenML ({remote})" if remote else ""
    return {"samples": samples, "available": False, "from": f"{needed[0]} in $WELLPOSED_DATA{fetched}"}


def _facts(data: Dataset) -> dict[str, Any]:
    parts = {"train": (data.X, data.y), "test": (data.X_test, data.y_test)}
    values = torch.cat([y.flatten() for _, y in parts.values() if y is not None]).unique()
    classes = len(values) <= MOST_CLASSES and bool((values == values.round()).all())  # of all parts: a small one has few values
    found: dict[str, Any] = {}
    for part, (X, y) in parts.items():
        if X is not None and y is not None:
            span = f"numbers in [{float(y.min()):.4g}, {float(y.max()):.4g}]"
            targets = ", ".join(f"{value:g}" for value in y.unique().tolist()) if classes else span
            found[part] = {"X": list(X.shape), "least": float(X.min()), "largest": float(X.max()), "targets": targets}
    return {"name": data.name, "steps": list(data.steps), "parts": found}


def _classes(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InvalidArgument(f"--classes takes numbers with commas between them, such as 0,1; got {text!r}.") from None
