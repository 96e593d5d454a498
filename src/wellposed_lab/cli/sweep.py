"""wellposed sweep."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from wellposed._progress import progress_display
from wellposed.data._load import short_name
from wellposed.errors import InvalidArgument
from wellposed_lab.cli._app import ALLOW_CODE, ExitCode, app, guarded, print_message, print_plain, print_table
from wellposed_lab.report import certified_text, spread_text, sweep_page
from wellposed_lab.runs.config import read, resolve
from wellposed_lab.runs.sweep import Sweep, absolute, parse_grid, read_sweep, run_sweep, spreads

__all__ = ["sweep"]

EPILOG = (
    "[bold]Examples[/]\n\n"
    "  wellposed sweep config.yaml --grid optimizer.lr=1e-3,1e-2 --seeds 5\n\n"
    "  wellposed sweep --grid model.width=64,128 --grid optimizer.name=sgd,adam --out sweeps/first\n\n"
    "  wellposed sweep --resume sweeps/first\n\n"
    "  wellposed sweep config.yaml --grid optimizer.lr=1e-3,1e-2 --dask tcp://10.0.0.1:8786\n\n"
    "Each run has its own directory in runs/ of the sweep. The exit code is 1 if a run failed or became infinite."
)
#: Columns of the table in the terminal; the page has all.
SHOWN = ("train_loss", "validation_loss", "test_loss", "test_accuracy", "test_miou")


@app.command(epilog=EPILOG)
@guarded
def sweep(
    config: Annotated[Path | None, typer.Argument(help="A YAML file; without one, digits 0 and 1.")] = None,
    grids: Annotated[
        list[str] | None, typer.Option("--grid", metavar="KEY=VALUE,VALUE", help="Values of a key; several keys are combined.")
    ] = None,
    seeds: Annotated[int, typer.Option("--seeds", metavar="N", help="Runs at every point, each with its own run.seed.")] = 1,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a key, e.g. run.epochs=5.")
    ] = None,
    folder: Annotated[Path | None, typer.Option("--out", help="The folder; sweeps/DATE-DATA if not given.")] = None,
    resume: Annotated[Path | None, typer.Option("--resume", help="Continue this sweep: train what is missing.")] = None,
    jobs: Annotated[int, typer.Option("--jobs", help="Processes; -1 for one a core.")] = -1,
    dask: Annotated[str | None, typer.Option("--dask", help="Address of a Dask scheduler to use instead.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print mean and spread as JSON.")] = False,
    with_report: Annotated[bool, typer.Option("--report/--no-report", help="Make the HTML page at the end.")] = True,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
    allow_code: Annotated[bool, typer.Option("--allow-code", help=ALLOW_CODE)] = False,
) -> None:
    """Train a configuration for every value of a grid and several seeds, and compare."""
    if resume is not None:
        if config or grids or changes or folder or seeds != 1:
            raise InvalidArgument("--resume takes everything from the sweep; omit CONFIG, --grid, --seeds, --set and --out.")
        chosen, folder = read_sweep(resume), resume
    else:
        settings = resolve({}, changes or []) if config is None else read(config, changes or [])
        chosen = Sweep(absolute(settings.model_dump(exclude_unset=True)), parse_grid(grids or []), seeds)
        folder = folder or Path("sweeps") / f"{time.strftime('%Y%m%d-%H%M%S')}-{short_name(settings.data.name)}"
    with progress_display("sweep", show=not quiet, line="{done:g} of {total:g} runs", bar="{done:.0f}/{total:.0f}") as display:
        try:
            results = run_sweep(
                chosen,
                folder,
                jobs=jobs,
                dask=dask,
                allow_code=allow_code or resume is None,
                listener=lambda done, total: display.update(done, total=total),
            )
        except KeyboardInterrupt:
            print_message(f"Interrupted. Continue with: wellposed sweep --resume {folder}")
            raise typer.Exit(ExitCode.INTERRUPTED) from None
    runs = chosen.runs()
    points, places = spreads(runs, results), [folder / "runs" / run.name for run in runs]
    failed = {
        run.name: str(result.get("error", "the loss became NaN or infinite: lower optimizer.lr."))
        for run, result in zip(runs, results, strict=True)
        if result.get("stop") in (None, "not_finite")
    }
    page = sweep_page(points, places, folder / "comparison.html", failed=failed) if with_report else None
    if as_json:
        typer.echo(json.dumps({"sweep": str(folder), "points": points}, indent=2))
    else:
        _show(points)
        print_plain(str(page or folder))
    for name, reason in failed.items():
        print_message(f"{name}: {reason}")
    if failed:
        raise typer.Exit(ExitCode.NEGATIVE)


def _show(points: list[dict[str, Any]]) -> None:
    keys = list(points[0]["point"])
    names = [name for name in SHOWN if any(name in point["measures"] for point in points)]
    table = Table(title="mean ± standard deviation over the seeds", title_justify="left")
    for name in (*keys, "runs", *(name.replace("_", " ") for name in names), "certified"):
        table.add_column(name)
    for point in points:
        values = [json.dumps(point["point"][key]).strip('"') for key in keys]
        measured = [spread_text(point["measures"].get(name)) for name in names]
        table.add_row(*values, f"{point['averaged']} of {point['runs']}", *measured, certified_text(point))
    print_table(table)
