"""From a configuration to a run directory, and from a run directory to its model."""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from wellposed.certify._dispatch import check_theorem
from wellposed.errors import RunError, WellposedError
from wellposed_lab.runs.checkpoint import load, newest, tidy
from wellposed_lab.runs.epoch_logger import STOPS, Listener, RunOutcome
from wellposed_lab.runs.loop import check_patience, fit
from wellposed_lab.runs.processes import World, joined, on_threads, threads_for
from wellposed_lab.runs.records import certificate_files, last_recorded, last_values, read_certificate, read_metrics, read_times
from wellposed_lab.runs.run import Run, read_config
from wellposed_lab.runs.setup import RunProblem, prepare, resolve_auto
from wellposed_lab.runs.training_state import Checkpoint, restore, seed_everything

if TYPE_CHECKING:
    from wellposed_lab.runs.config_sections import RunConfig

__all__ = ["Trained", "load_run", "train"]


@dataclass(frozen=True)
class Trained:
    """A run that ended, or was interrupted.

    Attributes:
        folder: The run directory.
        problem: Data, and the trained model.
        outcome: Of this session.
        summary: The content of summary.json.
        first: Whether this process writes and prints.
    """

    folder: Path
    problem: RunProblem
    outcome: RunOutcome
    summary: dict[str, Any]
    first: bool


def train(
    config: RunConfig, folder: Path, *, resume: bool = False, allow_code: bool = False, listener: Listener | None = None
) -> Trained:
    """Trains in a run directory, in one process or, under torchrun, in several.

    Mistakes in the configuration are found before anything is written, and `auto` values are
    resolved, so config.yaml has every key as it was used.

    Args:
        config: For `resume` from `read_config`.
        folder: The run directory.
        resume: Whether to continue the run in this directory.
        allow_code: Whether `model.class` may be imported, which runs its code.
        listener: Is called after batches and epochs, in the first process only.
    """
    with joined(config.run) as world, on_threads(1) as available:  # one thread draws the same network on every machine
        config = config if resume else resolve_auto(config)
        seed_everything(config.run.seed)
        problem = prepare(config, device=world.device, allow_code=allow_code)
        check_patience(config, problem.parts)
        if config.run.certify_every:
            check_theorem(config.run.theorem, problem.model, *problem.parts.train)
        config = _with_threads(config, problem, world.size, available)
        torch.set_num_threads(int(config.run.threads))
        seed_everything(config.run.seed)  # again: imports in `prepare` may draw, in the first run of a process only
        with _opened(world, config, folder, resume) as run:
            checkpoint = _where_to_continue(world, config, folder, run) if resume else None
            with _warnings_logged(run):
                outcome = fit(
                    problem.model,
                    problem.parts,
                    config,
                    loss=problem.loss,
                    run=run,
                    checkpoint=checkpoint,
                    world=world,
                    listener=listener if world.first else None,
                )
            if run is None:
                return Trained(folder, problem, outcome, {}, False)
            run.check()
            summary = _summary(run, problem, outcome)
            if outcome.stop == "interrupted":
                run.log(f"Interrupted after step {outcome.progress.step}; a checkpoint is saved.")
            else:
                run.finish(summary)
            return Trained(folder, problem, outcome, summary, True)


def load_run(
    folder: str | Path, *, at: str = "last", allow_code: bool = False
) -> tuple[RunConfig, RunProblem, Checkpoint | None]:
    """The configuration, data and model of a run, and its checkpoint; None at the start.

    Args:
        folder: The run directory.
        at: "last", or "best" of a run with `run.patience`.
        allow_code: Whether `model.class` may be imported, which runs its code.
    """
    folder = Path(folder)
    config = read_config(folder)
    problem = prepare(config, allow_code=allow_code)
    if at == "best":
        checkpoint: Checkpoint | None = load(folder / "checkpoints" / "best.json")
    else:
        log = functools.partial(warnings.warn, stacklevel=3)
        checkpoint = newest(folder / "checkpoints", config.fingerprints(), log=log)
    if checkpoint is not None:
        restore(checkpoint, problem.model)
    return config, problem, checkpoint


def _with_threads(config: RunConfig, problem: RunProblem, processes: int, available: int) -> RunConfig:
    """With a number in place of `run.threads: auto`; a given number is never changed."""
    if config.run.threads != "auto":
        return config
    X, _ = problem.parts.train
    batch = math.ceil(min(config.run.batch_size or len(X), len(X)) / processes)
    threads = threads_for(problem.model, X, batch=batch, available=available)
    return config.model_copy(update={"run": config.run.model_copy(update={"threads": threads})})


@contextlib.contextmanager
def _opened(world: World, config: RunConfig, folder: Path, resume: bool) -> Iterator[Run | None]:
    """The run in the first process, None in the others; an error of the first ends all."""
    if not world.first:
        if world.agree(0):
            raise RunError("The first process could not open the run directory; it says why.")
        yield None
        return
    try:
        run = Run.open(folder, config) if resume else Run.create(folder, config)
    except BaseException:
        world.agree(1)
        raise
    world.agree(0)
    with run:
        try:
            yield run
        except WellposedError as error:
            with contextlib.suppress(WellposedError):  # a full disk must not hide the error
                run.log(f"Ended by an error: {error}")
            raise


def _where_to_continue(world: World, config: RunConfig, folder: Path, run: Run | None) -> Checkpoint | None:
    log = run.log if run is not None else lambda text: None
    checkpoint = newest(folder / "checkpoints", config.fingerprints(), log=log)
    world.wait()  # no process removes checkpoints before all have read them
    if run is not None:
        for epoch, path in certificate_files(folder):
            if checkpoint is not None and epoch <= checkpoint.epoch:
                read_certificate(folder, path)  # refuses a damaged one now, not after training
        run.rewind(-1 if checkpoint is None else checkpoint.epoch)
        if checkpoint is not None:
            tidy(folder / "checkpoints", checkpoint, config.run.keep)
        run.log("Starts again." if checkpoint is None else f"Continues after epoch {checkpoint.epoch}.")
    return checkpoint


@contextlib.contextmanager
def _warnings_logged(run: Run | None) -> Iterator[None]:
    """Writes warnings to log.txt, not through the progress bar."""
    with warnings.catch_warnings():

        def show(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
            if run is not None:
                run.log(f"{category.__name__}: {message}")

        warnings.showwarning = show
        yield


def _last_certificate(run: Run, rows: list[dict[str, Any]], outcome: RunOutcome) -> dict[str, Any] | None:
    """The main entries of the last certificate of a run; None without certificates.

    `as_recorded` says whether it was read from a file, and not made in this session.
    """
    try:
        found = last_recorded(run.folder, rows)
    except RunError as error:  # the run has ended, and its summary must still be written
        run.log(f"The summary has no certificate: {error}")
        return None
    if found is None:
        return None
    if found.contradiction:
        run.log(f"The last certificate does not count: {found.contradiction}.")
    saved = found.certificate.to_dict()
    keys = ("theorem", "verdict", "dynamics", "step_size", "rates", "rate")
    return {"file": found.name, "as_recorded": outcome.certificate is None} | {key: saved[key] for key in keys}


def _total_seconds(times: list[dict[str, Any]]) -> float | None:
    """Of all epochs together; None if no float can hold the sum: then it is no time of a run."""
    total = float(sum(time["seconds"] for time in times))
    return round(total, 3) if math.isfinite(total) else None


def _summary(run: Run, problem: RunProblem, outcome: RunOutcome) -> dict[str, Any]:
    rows = read_metrics(run.folder)
    times = read_times(run.folder)
    certified = [row["epoch"] for row in rows if row.get("certified")]
    few = any("train_unconverged" in row for row in rows)  # equilibria are looked for in evaluations only
    return {
        "stop": outcome.stop,
        "stop_message": STOPS[outcome.stop],
        "epochs": outcome.progress.epoch,
        "steps": outcome.progress.step,
        "seconds": _total_seconds(times),
        "samples": {name: len(X) for name, (X, _) in problem.parts.items()},
        "parameters": sum(parameter.numel() for parameter in problem.model.parameters()),
        "first_certified_epoch": certified[0] if certified else None,
        "certificate": _last_certificate(run, rows, outcome),
        "best_epoch": outcome.progress.best_epoch,
        "unconverged": None if few else sum(row.get("unconverged") or 0 for row in rows),
        "last": last_values(rows),
    }
