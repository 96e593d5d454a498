"""wellposed landscape."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.table import Table
from torch import Tensor, nn

from wellposed._io import check_outputs, write_whole, writing
from wellposed._progress import progress_display
from wellposed.data._load import short_name
from wellposed.errors import InvalidArgument, MissingPackage, WellposedError, did_you_mean
from wellposed.landscape import CellStatus, Surface, filter_normalized, hessian_directions, random_direction, sharpness, surface
from wellposed.plot import contour, line
from wellposed.plot._files import FORMATS, rendered
from wellposed_lab.cli._app import ALLOW_CODE, ExitCode, app, guarded, message_console, print_message, print_table
from wellposed_lab.runs.losses import AbstractLoss
from wellposed_lab.runs.processes import threads_for
from wellposed_lab.runs.run import refuse_foreign
from wellposed_lab.runs.setup import RunProblem
from wellposed_lab.runs.training import load_run

__all__ = ["landscape"]

EPILOG = (
    "[bold]Examples[/]\n\n"
    "  wellposed landscape runs/first\n\n"
    "  wellposed landscape runs/first --line --points 101 --radius 2\n\n"
    "  wellposed landscape runs/first --direction hessian --radius 0.5 --out pictures\n\n"
    "  wellposed landscape runs/first --points 51 --samples 100 --resume\n\n"
    "Points without one equilibrium are marked and never drawn as losses. Where one is found that the network's own bound does "
    "not prove, the picture is dotted. The exit code is 1 if there is no loss at the centre."
)

DIRECTIONS = ("filter", "random", "hessian")
#: Parameters times samples up to which the Hessian is computed by default.
CHEAP = 200_000
LINE = "landscape: {done:g} of {total:g} points"


@app.command(epilog=EPILOG)
@guarded
def landscape(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.")],
    points: Annotated[int, typer.Option("--points", min=2, help="Points along each direction.")] = 21,
    radius: Annotated[float, typer.Option("--radius", help="Steps along a direction go from -radius to radius.")] = 1.0,
    one: Annotated[bool, typer.Option("--line", help="One direction in place of two.")] = False,
    direction: Annotated[
        str,
        typer.Option(
            "--direction",
            help="filter (random, every filter scaled to its weights), random, or hessian (largest curvature); the last two "
            "have length 1.",
        ),
    ] = "filter",
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the directions and the starts of the solver.")] = 0,
    samples: Annotated[
        int | None, typer.Option("--samples", help="The first so many training samples; all if not given.")
    ] = None,
    at: Annotated[str, typer.Option("--at", help="last or best: which checkpoint of the run.")] = "last",
    folder: Annotated[Path | None, typer.Option("--out", help="Where to write; RUN/figures if not given.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Keep the points that landscape.npz holds already.")] = False,
    curved: Annotated[
        bool | None,
        typer.Option("--sharpness/--no-sharpness", help="Trace and largest eigenvalues of the Hessian; if cheap, unless said."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
    allow_code: Annotated[bool, typer.Option("--allow-code", help=ALLOW_CODE)] = False,
) -> None:
    """Draw the loss around the parameters of a run; mark points without one equilibrium."""
    if at not in ("last", "best"):
        raise InvalidArgument(f"--at must be last or best; got {at!r}.")
    if direction not in DIRECTIONS:
        hint = did_you_mean(direction, DIRECTIONS)
        raise InvalidArgument(f"--direction must be filter, random or hessian; got {direction!r}.{hint}")
    config, problem, checkpoint = load_run(run, at=at, allow_code=allow_code)
    X, y = _samples(problem, samples)
    model, loss = problem.model, _mean(problem.loss)
    torch.set_num_threads(threads_for(model, X))
    if folder is None:
        refuse_foreign(run)
        folder = run / "figures"
    file = folder / "landscape.npz"
    check_outputs(folder, [f"landscape{ending}" for ending in (".npz", ".json", *FORMATS)])
    if file.exists() and not resume:
        raise InvalidArgument(f"{file} holds a landscape already: continue it by --resume, or choose another folder by --out.")
    generator = torch.Generator().manual_seed(seed)
    directions = _directions(direction, 1 if one else 2, model, loss, X, y, generator)
    try:
        with (
            writing(file, begun=False),
            progress_display("landscape", show=not quiet, line=LINE, bar="{done:.0f}/{total:.0f}", ends=False) as display,
        ):
            found = surface(
                model, loss, X, y,
                directions=directions, num=points, radius=radius, generator=generator, file=file,
                progress=lambda done, total: display.update(done, total=total),
            )  # fmt: skip
    except KeyboardInterrupt:
        print_message("Interrupted; the points so far are saved. Continue with the same words and --resume.")
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    centre = surface(model, loss, X, y, directions=directions[:1], num=1, generator=torch.Generator().manual_seed(seed))
    known = bool(np.isfinite(centre.values[0]))
    summary: dict[str, Any] = {
        "run": str(run),
        "at": "at the start" if checkpoint is None else f"after epoch {checkpoint.epoch}",
        "model": config.model.name,
        "data": short_name(config.data.name),
        "loss": type(problem.loss).__name__,
        "samples": len(X),
        "parameters": sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        "direction": direction,
        "seed": seed,
        "radius": radius,
        "points": list(found.values.shape),
        "counts": found.counts(),
        "centre": {"loss": float(centre.values[0]) if known else None, "status": CellStatus(int(centre.status[0])).name},
        "range": _range(found),
        "seconds": round(found.seconds, 3),
    }
    summary |= _sharpness(summary, curved, seed, model, loss, X, y)
    pictures = _draw(found, folder / "landscape.png", _title(summary))
    summary["files"] = {"record": str(file), "summary": str(folder / "landscape.json"), **pictures}
    text = json.dumps(summary, indent=2)
    write_whole(folder / "landscape.json", f"{text}\n".encode(), begun=False)
    if as_json:
        typer.echo(text)
    else:
        _show(summary)
    if not known:
        raise typer.Exit(ExitCode.NEGATIVE)


def _samples(problem: RunProblem, count: int | None) -> tuple[Tensor, Tensor]:
    X, y = problem.parts.train
    if count is not None and not 0 < count <= len(X):
        raise InvalidArgument(f"--samples must be from 1 to {len(X)}, the training samples of the run; got {count}.")
    return X[:count], y[:count]


def _mean(loss: AbstractLoss) -> Callable[[Any, Any], Tensor]:
    """The loss of the run as one number: the mean over what it counts."""

    def mean(output: Tensor, y: Tensor) -> Tensor:
        return loss.total(output, y) / max(loss.count(y), 1)

    mean.__qualname__ = type(loss).__name__  # part of the record, which --resume compares
    return mean


def _directions(
    kind: str, num: int, model: nn.Module, loss: Callable[[Any, Any], Tensor], X: Tensor, y: Tensor, generator: torch.Generator
) -> list[dict[str, Tensor]]:
    if kind == "hessian":
        with message_console().status("looking for the largest curvature"):
            return hessian_directions(model, loss, X, y, num=num, generator=generator)
    drawn = [random_direction(model, generator=generator) for _ in range(num)]
    if kind == "filter":
        return [filter_normalized(model, one) for one in drawn]
    return [_unit(one) for one in drawn]


def _unit(direction: dict[str, Tensor]) -> dict[str, Tensor]:
    length = torch.cat([part.reshape(-1) for part in direction.values()]).norm()
    return {name: part / length for name, part in direction.items()}


def _range(found: Surface) -> list[float] | None:
    """The least and the largest loss on the surface."""
    known = found.values[np.isfinite(found.values)]
    return [float(known.min()), float(known.max())] if known.size else None


def _sharpness(summary: dict[str, Any], asked: bool | None, seed: int, *of: Any) -> dict[str, Any]:
    """The numbers of (model, loss, X, y), or None and why there are none."""
    if asked is False:
        return {"sharpness": None, "sharpness_missing": "not asked for"}
    if summary["centre"]["loss"] is None:
        return {"sharpness": None, "sharpness_missing": "there is no loss at the centre"}
    if asked is None and summary["parameters"] * summary["samples"] > CHEAP:
        return {"sharpness": None, "sharpness_missing": "not cheap here; ask with --sharpness, or for fewer --samples"}
    try:
        with message_console().status("looking at the Hessian"):
            found = sharpness(*of, generator=torch.Generator().manual_seed(seed))
    except WellposedError as error:
        return {"sharpness": None, "sharpness_missing": str(error)}
    return {"sharpness": found.to_dict()}


def _draw(found: Surface, path: Path, title: str) -> dict[str, str | None]:
    """The paths of the picture in all formats; without matplotlib a message, and None."""
    ends = _range(found)
    log = ends is not None and ends[0] > 0 and ends[1] > 100 * ends[0]
    try:
        figure = line(found, log=log) if found.values.ndim == 1 else contour(found, log=log)
    except MissingPackage as missing:
        print_message(f"There is no picture: {missing}")
        return {"picture": None}
    figure.axes[0].set_title(title, fontsize=10)
    for ending, content in rendered(figure).items():
        write_whole(path.with_suffix(ending), content, begun=False)
    return {"picture" if ending == ".png" else ending[1:]: str(path.with_suffix(ending)) for ending in FORMATS}


def _title(summary: dict[str, Any]) -> str:
    return f"{summary['model']} on {summary['data']}, {summary['at']}"


def _show(summary: dict[str, Any]) -> None:
    table = Table(title=_title(summary), show_header=False, title_justify="left")
    shape = " x ".join(map(str, summary["points"]))
    table.add_row(
        "points", f"{shape}, {summary['direction']} directions, radius {summary['radius']:g}, {summary['seconds']:.1f} s"
    )
    table.add_row("loss", f"{summary['loss']} of {summary['samples']} training samples, {summary['parameters']} parameters")
    for status in CellStatus:
        if count := summary["counts"].get(status.name):
            table.add_row(status.name.lower().replace("_", " "), f"{count}: {status.message}")
    centre, ends, curvature = summary["centre"], summary["range"], summary["sharpness"]
    table.add_row(
        "at the centre",
        f"unknown: {CellStatus[centre['status']].message}" if centre["loss"] is None else f"{centre['loss']:.6g}",
    )
    table.add_row("on the surface", "no loss is known" if ends is None else f"{ends[0]:.6g} to {ends[1]:.6g}")
    if curvature is None:
        table.add_row("sharpness", summary["sharpness_missing"])
    else:
        top = ", ".join(f"{value:.4g}" for value in curvature["eigenvalues"])
        table.add_row("gradient", f"norm {curvature['gradient_norm']:.4g}")
        trace = f"trace {curvature['trace']:.4g} ± {curvature['trace_standard_error']:.2g}"
        table.add_row("Hessian", f"largest eigenvalues {top}; {trace}")
    for path in summary["files"].values():
        if path is not None:
            table.add_row("written", path)
    print_table(table)
