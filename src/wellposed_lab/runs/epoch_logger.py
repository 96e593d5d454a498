"""After every epoch: a row of metrics, a certificate, the decision to stop, a checkpoint."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from wellposed.certify import Certificate
from wellposed.certify._any_model import certificate_of, has_certificate
from wellposed.errors import how_to_install
from wellposed_lab.runs.checkpoint import prune, save
from wellposed_lab.runs.training_state import Checkpoint, Progress, capture

if TYPE_CHECKING:
    from wellposed_lab.runs.loop import TrainStep
    from wellposed_lab.runs.run import Run
    from wellposed_lab.runs.setup import DataParts

__all__ = ["STOPS", "EpochLogger", "Listener", "RunOutcome"]

#: Why a run ended, in words.
STOPS = {
    "epochs": "all epochs are done",
    "patience": "the validation loss did not get better",
    "stop_loss": "the training loss is small enough",
    "not_finite": "the loss became NaN or infinite; the parameters are those before",
    "interrupted": "it was interrupted",
}


class Listener(Protocol):
    """Is called after every batch and every epoch."""

    def on_batch(self, epoch: int, batch: int, batches: int, loss: float) -> None: ...

    def on_epoch(self, row: dict[str, Any]) -> None: ...


@dataclass
class RunOutcome:
    """The end of training.

    Attributes:
        stop: A key of `STOPS`.
        progress: Where it ended.
        rows: Of this session.
        certificate: The last one, or None.
    """

    stop: str
    progress: Progress
    rows: list[dict[str, Any]] = field(default_factory=list)
    certificate: Certificate | None = None


class EpochLogger:
    """Writes what an epoch gave. Only the first process writes, but all make the same decisions."""

    def __init__(
        self, train_step: TrainStep, parts: DataParts, run: Run | None, listener: Listener | None, outcome: RunOutcome
    ) -> None:
        self.train_step, self.parts, self.listener, self.outcome = train_step, parts, listener, outcome
        self.run = run if train_step.world.first else None
        self.options, self.progress = train_step.config.run, outcome.progress
        self._tensorboard = self._open_tensorboard()

    def __enter__(self) -> EpochLogger:
        return self

    def __exit__(self, *_: object) -> None:
        if self._tensorboard is not None:
            self._tensorboard.close()

    def close_epoch(self, *, rate: float, began: float) -> None:
        """A row, a certificate if one is due, the decision to stop, a checkpoint; in this order."""
        progress, options = self.progress, self.options
        last = progress.epoch == options.epochs
        row: dict[str, Any] = {"epoch": progress.epoch, "step": progress.step, "learning_rate": rate}
        if progress.totals:
            loss, items, steps, solved, failed = progress.totals
            row["batch_loss"] = loss / max(items, 1.0)
            row |= {"equilibrium_steps": steps / solved, "unconverged": int(failed)} if solved else {}
        if progress.epoch % options.evaluate_every == 0 or last:
            for name, (X, y) in self.parts.items():
                row |= {f"{name}_{key}": value for key, value in self.train_step.evaluate(X, y).items()}
        better = self._judge(row)
        last = last or progress.stop is not None
        if options.certify_every and (progress.epoch % options.certify_every == 0 or last):
            row |= self._certify(progress.epoch)
        progress.totals = []
        self.outcome.rows.append(row)
        if self.run is not None:
            self.run.append(row, time.perf_counter() - began)
            self._add_scalars(row)
            if better and options.patience is not None:
                save(self._captured(), self.run.folder / "checkpoints", "best")
        if progress.epoch % options.checkpoint_every == 0 or last:
            self.checkpoint()
        if self.listener is not None:
            self.listener.on_epoch(row)

    def interrupted(self) -> RunOutcome:
        """Saves the state within an epoch."""
        self.checkpoint(interrupted=True)
        self.outcome.stop = "interrupted"
        return self.outcome

    def checkpoint(self, *, interrupted: bool = False) -> None:
        """Saves the state, and then removes old checkpoints."""
        if self.run is not None:
            folder = self.run.folder / "checkpoints"
            save(self._captured(), folder, interrupted=interrupted)
            prune(folder, self.options.keep)

    def _captured(self) -> Checkpoint:
        step = self.train_step
        return capture(step.model, step.optimizer, self.progress, fingerprint=step.config.fingerprint())

    def _judge(self, row: dict[str, Any]) -> bool:
        """Whether the validation loss is the best so far; sets the reason to stop, if any."""
        progress, options = self.progress, self.options
        if not math.isfinite(row.get("train_loss", 0.0)):
            progress.stop = "not_finite"
        elif options.stop_loss is not None and row.get("train_loss", math.inf) <= options.stop_loss:
            progress.stop = "stop_loss"
        validation = row.get("validation_loss")
        if validation is None:
            return False
        if progress.best is None or validation < progress.best:
            progress.best, progress.best_epoch = validation, progress.epoch
            return True
        if options.patience is not None and progress.epoch - (progress.best_epoch or 0) >= options.patience:
            progress.stop = progress.stop or "patience"
        return False

    def _certify(self, epoch: int) -> dict[str, Any]:
        """Entries of the row. The first process certifies, with all training samples."""
        if not has_certificate(self.train_step.model) or not self.train_step.world.first:
            return {}
        X, y = self.parts.train
        certificate = certificate_of(self.train_step.model, X, y, theorem=self.options.theorem)
        self.outcome.certificate = certificate
        if self.run is not None:
            self.run.add_certificate(epoch, certificate)
        return {"certified": certificate.certified, "certified_by": certificate.theorem, "certified_rate": certificate.rate}

    def _open_tensorboard(self) -> Any:
        """A writer of events, if they are wanted and TensorBoard is installed; else None."""
        if self.run is None or not self.options.tensorboard:
            return None
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            self.run.log(f"No events are written: TensorBoard is not installed; {how_to_install('runs')}.")
            return None
        epoch = self.progress.epoch  # what was written about later epochs does not count
        return SummaryWriter(str(self.run.folder / "tensorboard"), purge_step=epoch + 1 if epoch else None)

    def _add_scalars(self, row: dict[str, Any]) -> None:
        if self._tensorboard is None:
            return
        for name, value in row.items():
            if name != "epoch" and isinstance(value, (int, float)):
                part, _, measure = name.partition("_")
                tag = f"{measure}/{part}" if part in ("train", "validation", "test") else name
                self._tensorboard.add_scalar(tag, float(value), row["epoch"])
        self._tensorboard.flush()
