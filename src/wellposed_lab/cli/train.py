"""wellposed train."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from wellposed._progress import ProgressDisplay, progress_display
from wellposed.certify import Certificate
from wellposed.data._load import short_name
from wellposed.errors import InvalidArgument
from wellposed_lab.cli._app import ALLOW_CODE, ExitCode, app, guarded, print_message, print_plain, print_table
from wellposed_lab.runs.config import RunConfig, read, resolve
from wellposed_lab.runs.config_sections import extended
from wellposed_lab.runs.epoch_logger import STOPS
from wellposed_lab.runs.loop import learning_rate
from wellposed_lab.runs.models import MODELS
from wellposed_lab.runs.proving import FOLDER, about, prove_start
from wellposed_lab.runs.records import halving, hidden_ratio, last_recorded, moves, plain_flow, read_metrics
from wellposed_lab.runs.run import read_config
from wellposed_lab.runs.setup import resolve_auto
from wellposed_lab.runs.training import Trained
from wellposed_lab.runs.training import train as train_run

__all__ = ["equilibria", "train"]

EPILOG = (
    "[bold]Examples[/]\n\n"
    "  wellposed train\n\n"
    "  wellposed train --set model.name=skip --set data.norm=unit --set run.epochs=40\n\n"
    "  wellposed train --set model.name=dense --set data.n=null --set run.dtype=float32\n\n"
    "  wellposed train --set data.name=sphere --set run.epochs=100\n\n"
    "  wellposed train --set data.name=houses.csv --set data.target=price\n\n"
    "  wellposed train --show-config > config.yaml; wellposed train config.yaml --out runs/first\n\n"
    "  wellposed train --resume runs/first\n\n"
    "  wellposed train --set run.devices=2\n\n"
    "  torchrun --nproc-per-node 2 -m wellposed train config.yaml --out runs/second\n\n"
    "[bold]Networks[/] (model.name)\n\n"
    + "\n\n".join(f"  {name}: {kind.summary.replace('[', chr(92) + '[')}" for name, kind in MODELS.items())
)
LINE, BAR = "epoch {done:.1f} of {total:g}: {text}", "{done:.1f}/{total:.0f} {text}"


class EpochProgress:
    """A `Listener` of `fit`; measurements at the end of an epoch stay visible, with the epoch.

    Args:
        display: Shows the epochs.
        notice: Is printed when training has begun: a run that is refused has nothing to say.
    """

    def __init__(self, display: ProgressDisplay, notice: str = "") -> None:
        self._display, self._measured, self._notice = display, "", notice

    def on_batch(self, epoch: int, batch: int, batches: int, loss: float) -> None:
        """A step was taken."""
        if self._notice:
            print_message(self._notice)
            self._notice = ""
        self._display.update(epoch + batch / batches, f"batch loss {loss:.3g}{self._measured}")

    def on_epoch(self, row: dict[str, Any]) -> None:
        """An epoch is over."""
        known = [("train_loss", "train loss"), ("validation_loss", "validation loss"), ("test_accuracy", "test accuracy")]
        parts = [f"{label} {row[name]:.4g}" for name, label in known if name in row]
        if "certified" in row:
            parts.append("certified" if row["certified"] else "not certified")
        if parts:
            self._measured = f"; at epoch {row['epoch']}: {', '.join(parts)}"
        mean = f"mean batch loss {row['batch_loss']:.3g}" if "batch_loss" in row else "at the start"
        self._display.update(row["epoch"], f"{mean}{self._measured}")


@app.command(epilog=EPILOG)
@guarded
def train(
    config: Annotated[Path | None, typer.Argument(help="A YAML file; without one, digits 0 and 1 with a certificate.")] = None,
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a key, e.g. optimizer.lr=1e-3.")
    ] = None,
    folder: Annotated[Path | None, typer.Option("--out", help="The run directory; runs/DATE-MODEL-DATA if not given.")] = None,
    resume: Annotated[Path | None, typer.Option("--resume", help="Continue this run directory.")] = None,
    show_config: Annotated[bool, typer.Option("--show-config", help="Print the whole configuration and stop.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
    with_report: Annotated[bool, typer.Option("--report/--no-report", help="Make the HTML page at the end.")] = True,
    samples: Annotated[
        int | None,
        typer.Option("--prove", metavar="N", help="Then prove that plain descent from the same start fits N of the samples."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
    allow_code: Annotated[bool, typer.Option("--allow-code", help=ALLOW_CODE)] = False,
) -> None:
    """Train a network in a run directory, with evaluations, checkpoints and certificates."""
    settings, folder, notice = _settings(config, list(changes or []), folder, resume)
    if show_config:
        typer.echo(settings.to_yaml(), nl=False)
        return
    if settings.run.devices > 1 and "WORLD_SIZE" not in os.environ:
        raise typer.Exit(_in_processes(settings.run.devices, folder, [] if resume else ["--out", str(folder)]))
    with _interruption_explained(folder):
        with progress_display("training", settings.run.epochs, show=not quiet, line=LINE, bar=BAR, ends=False) as display:
            # a new run is of a configuration that its user has chosen to train; a run directory may be a stranger's
            allowed, listener = allow_code or resume is None, EpochProgress(display, notice=notice)
            trained = train_run(settings, folder, resume=resume is not None, allow_code=allowed, listener=listener)
        if not trained.first:
            return
        if trained.outcome.finished_before:
            print_message(_nothing_trained(trained, settings.run.epochs))
        summary = {"run": str(folder), **trained.summary}
        if samples is not None and trained.outcome.stop != "interrupted":
            summary["proof"] = about(
                prove_start(settings, folder / FOLDER, samples=samples, progress=not quiet), settings.optimizer.name
            )
        report = _report(folder) if with_report and trained.outcome.stop != "interrupted" else None
    if report is not None:
        summary["report"] = str(report)
    if as_json:
        typer.echo(json.dumps(summary, indent=2))
    else:
        _show(trained, settings, summary.get("proof", ""))
        # the last line, so that `$(wellposed train | tail -1)` is the page, or the run without one
        print_plain(str(report or folder))
    if trained.outcome.stop == "interrupted":
        print_message(f"Interrupted; a checkpoint is saved. Continue with: wellposed train --resume {folder}")
        raise typer.Exit(ExitCode.INTERRUPTED)
    if trained.outcome.stop == "not_finite":
        print_message("The loss became NaN or infinite: lower optimizer.lr.")
        raise typer.Exit(ExitCode.NEGATIVE)


def _in_processes(devices: int, folder: Path, more: list[str]) -> int:
    """The exit code of this command in several processes; the first one prints."""
    from wellposed_lab.runs.launch import launch

    code, what = launch(devices, [*sys.argv[1:], *more])
    if what and (folder / "config.yaml").is_file():
        print_message(f"{what} Nothing is lost up to the last checkpoint. Continue with: wellposed train --resume {folder}")
    elif what:
        print_message(f"{what} {folder} was not a run yet: start it again with the same words.")
    return code


def _settings(config: Path | None, changes: list[str], folder: Path | None, resume: Path | None) -> tuple[RunConfig, Path, str]:
    """The configuration, the run directory, and what is to be said when training begins."""
    if resume is None:
        settings = resolve_auto(resolve({}, changes) if config is None else read(config, changes))
        date = time.strftime("%Y%m%d-%H%M%S")
        name = f"{date}-{settings.model.name}-{short_name(settings.data.name)}"
        return settings, folder or _unused(Path("runs") / name), ""
    if config is not None or folder is not None:
        raise InvalidArgument("--resume takes the configuration and the directory of the run; omit CONFIG and --out.")
    before = read_config(resume)
    try:
        settings = extended(before, resolve(before.model_dump(), changes))
    except InvalidArgument as error:
        new = f"Start a new run with: wellposed train {resume / 'config.yaml'} --set ..."
        raise InvalidArgument(f"{error} {new}") from None
    return settings, resume, "" if settings.run.extended == before.run.extended else _extension(settings)


@contextlib.contextmanager
def _interruption_explained(folder: Path) -> Iterator[None]:
    """Says how to continue after an interruption before the first step or after the last."""
    try:
        yield
    except KeyboardInterrupt:
        if (folder / "config.yaml").is_file():
            print_message(f"Interrupted. Continue with: wellposed train --resume {folder}")
        else:
            print_message(f"Interrupted before {folder} was a run: nothing is saved. Start it again with the same words.")
        raise typer.Exit(ExitCode.INTERRUPTED) from None


def _nothing_trained(trained: Trained, wanted: int) -> str:
    """The first line about a run that had nothing left to do to have the `wanted` epochs."""
    stop, epochs = trained.outcome.stop, trained.summary["epochs"]
    if wanted < epochs:
        return f"Nothing was trained: run.epochs={wanted} is less than the {epochs} epochs that {trained.folder} has done."
    said = f"Nothing was trained: {trained.folder} was finished before, after epoch {epochs} ({STOPS[stop]})."
    longer = f"--resume {trained.folder} --set run.epochs={2 * epochs}"
    return f"{said} For more epochs: wellposed train {longer}" if stop == "epochs" else said


def _extension(settings: RunConfig) -> str:
    """Under a cosine schedule an extended run differs from one started with this length."""
    old, new = settings.run.extended[-1], settings.run.epochs
    rate = learning_rate(settings.optimizer, old, 1, new)
    return (
        f"The cosine schedule depends on run.epochs: up to epoch {old} it stays that of {old} epochs, after it that of {new}, "
        f"so the step size rises from near 0 to {rate:.3g} there. A run of {new} epochs from the start has other numbers; "
        "with optimizer.schedule=constant or step it has the same."
    )


def _unused(folder: Path) -> Path:
    """The folder, or with a number if it exists."""
    names = [folder, *(folder.with_name(f"{folder.name}-{i}") for i in range(2, 1000))]
    return next(name for name in names if not name.exists())


def _show(trained: Trained, settings: RunConfig, proof: str) -> None:
    summary, last = trained.summary, trained.summary["last"]
    table = Table(title=f"{settings.model.name} on {short_name(settings.data.name)}", show_header=False, title_justify="left")
    samples = ", ".join(f"{count} {name}" for name, count in summary["samples"].items())
    rows: list[tuple[str, str]] = [
        ("samples", samples),
        ("network", f"width {settings.model.width}, {summary['parameters']} parameters, {settings.run.dtype}"),
        (
            "trained",
            f"{summary['epochs']} epochs, {summary['steps']} steps, {_seconds(summary['seconds'])}: {summary['stop_message']}",
        ),
    ]
    for measure, form in (("loss", "{:.4g}"), ("accuracy", "{:.2%}"), ("miou", "{:.2%}"), ("psnr", "{:.2f} dB")):
        found = [(part, last[f"{part}_{measure}"]) for part in ("train", "validation", "test") if f"{part}_{measure}" in last]
        if found:
            rows.append((measure, ", ".join(f"{part} {form.format(value)}" for part, value in found)))
    if "equilibrium_steps" in last:
        rows.append(("equilibria", equilibria(summary)))
    if "certified" in last and (words := _last_certificate(trained, settings.optimizer.name)):
        rows.append(("certificate", words))
    if proof:
        rows.append(("proof", proof))
    for row in rows:
        table.add_row(*row)
    print_table(table)
    if any(" not found" in words for name, words in rows if name == "equilibria"):
        print_message("Losses of equilibria that were not found mean little: raise model.max_steps or model.rtol.")


def equilibria(summary: dict[str, Any]) -> str:
    """How many evaluations equilibria took and whether they were found, in words."""
    last = summary["last"]
    part = next((part for part in ("test", "validation", "train") if f"{part}_unconverged" in last), None)
    if part is None:
        failed = f"{summary['unconverged']} not found" if summary["unconverged"] else "all found"
        return f"{last['equilibrium_steps']:.1f} evaluations on average, {failed}"
    count = last[f"{part}_unconverged"]
    failed = f"{count} of {summary['samples'][part]} not found" if count else "all found"
    few = f"training takes {last['equilibrium_steps']:.1f} and looks for none"
    return f"{part} {last[f'{part}_equilibrium_steps']:.1f} evaluations on average, {failed}; {few}"


def _seconds(total: float | None) -> str:
    return "unknown time" if total is None else f"{total:.1f} s"


def _last_certificate(trained: Trained, optimizer: str) -> str:
    """The last certificate in words; one from a file is said to be as recorded."""
    first = trained.summary["first_certified_epoch"]
    if trained.outcome.certificate is not None:
        return _certificate(trained.outcome.certificate, first, optimizer)
    found = last_recorded(trained.folder, read_metrics(trained.folder))
    if found is None:
        return ""
    if found.contradiction:
        words = f"not certified: {found.contradiction}; `wellposed certify RUN` computes it again"
    else:
        words = _certificate(found.certificate, first, optimizer)
    return f"{words} (as recorded in {found.name})"


def _certificate(certificate: Certificate, first: int | None, optimizer: str) -> str:
    """The last verdict and what it is about, which is not the optimizer used."""
    if not certificate.certified:
        return f"not certified ({certificate.theorem}); `wellposed certify RUN` says why"
    if certificate.rate is None:
        licensed = next(iter(certificate.licenses), "exactly one equilibrium for every input").split(". ")[0].rstrip(".")
        return f"CERTIFIED by {certificate.theorem}: {licensed}; nothing about training"
    head = f"CERTIFIED by {certificate.theorem}{'' if first is None else f', first at epoch {first}'}: "
    flows = certificate.dynamics == "flow"
    path = "the gradient flow from here" if flows else "gradient descent from here with the licensed steps"
    pace = f"exp(-{certificate.rate:.4g} t)" if flows else f"{certificate.rate:.10g} per step"
    beside = "" if flows and hidden_ratio(certificate) == 1 else f"; {plain_flow(certificate)}"
    return (
        f"{head}{path}, {moves(certificate)}, ends at zero loss; {halving(certificate)} (factor {pace} or better){beside}. "
        f"This is proved for that method, not for {optimizer}"
    )


def _report(folder: Path) -> Path | None:
    """The page of the run, if pages can be made."""
    if importlib.util.find_spec("wellposed_lab.report") is None:
        return None
    try:
        path = Path(importlib.import_module("wellposed_lab.report").write(folder))
    except Exception as error:  # the run is complete without its page
        print_message(f"The report could not be made ({type(error).__name__}: {error}).")
        return None
    return path if path.exists() else None
