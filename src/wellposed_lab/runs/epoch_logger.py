"""The books of minibatch training: rows, certificates and checkpoints."""

from __future__ import annotations

import math
import time
from typing import Any

from wellposed_lab.runs._events import Events
from wellposed_lab.runs.train_step import Trainee
from wellposed.certify import certify
from wellposed.certify._dispatch import has_certificate
from wellposed_lab.runs.checkpoint import Checkpoint, capture, prune, save
from wellposed_lab.runs.outcome import Listener, Outcome, Parts
from wellposed_lab.runs.run import Run

__all__ = ["Books"]


class Books:
    """Only the first process writes them, but all go through the same decisions."""

    def __init__(self, trainee: Trainee, parts: Parts, run: Run | None, listener: Listener | None, outcome: Outcome) -> None:
        self.trainee, self.parts, self.listener, self.outcome = trainee, parts, listener, outcome
        self.run = run if trainee.world.first else None
        self.options, self.progress = trainee.config.run, outcome.progress
        self.events = Events(self.run, enabled=self.options.tensorboard, after=self.progress.epoch)

    def close_epoch(self, *, rate: float, began: float) -> None:
        """A row, a certificate if one is due, the decision to stop, a checkpoint: in this order, so that none runs ahead."""
        progress, options = self.progress, self.options
        last = progress.epoch == options.epochs
        row: dict[str, Any] = {"epoch": progress.epoch, "step": progress.step, "learning_rate": rate}
        if progress.totals:
            loss, items, steps, solved, failed = progress.totals
            row["batch_loss"] = loss / max(items, 1.0)
            row |= {"equilibrium_steps": steps / solved, "unconverged": int(failed)} if solved else {}
        if progress.epoch % options.evaluate_every == 0 or last:
            for name, (X, y) in self.parts.items():
                row |= {f"{name}_{key}": value for key, value in self.trainee.evaluate(X, y).items()}
        better = self._judge(row)
        last = last or progress.stop is not None
        if options.certify_every and (progress.epoch % options.certify_every == 0 or last):
            row |= self._certify(progress.epoch)
        progress.totals = []
        self.outcome.rows.append(row)
        if self.run is not None:
            self.run.append(row, time.perf_counter() - began)
            self.events.add(row)
            if better and options.patience is not None:
                save(self._captured(), self.run.folder / "checkpoints", "best")
        if progress.epoch % options.checkpoint_every == 0 or last:
            self.checkpoint()
        if self.listener is not None:
            self.listener.on_epoch(row)

    def interrupted(self) -> Outcome:
        """Saves the state in the middle of things."""
        self.checkpoint(interrupted=True)
        self.outcome.stop = "interrupted"
        return self.outcome

    def checkpoint(self, *, interrupted: bool = False) -> None:
        """Saves the state, and drops old ones afterwards."""
        if self.run is not None:
            folder = self.run.folder / "checkpoints"
            save(self._captured(), folder, interrupted=interrupted)
            prune(folder, self.options.keep)

    def _captured(self) -> Checkpoint:
        trainee = self.trainee
        return capture(trainee.model, trainee.optimizer, self.progress, fingerprint=trainee.config.fingerprint())

    def _judge(self, row: dict[str, Any]) -> bool:
        """Whether the validation loss is the best so far; sets the reason to stop, if there is one."""
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
        """The entries of the row; certificates are about all training samples, and the first process makes them."""
        if not has_certificate(self.trainee.model) or not self.trainee.world.first:
            return {}
        X, y = self.parts.train
        certificate = certify(self.trainee.model, X, y, theorem=self.options.theorem)
        self.outcome.certificate = certificate
        if self.run is not None:
            self.run.add_certificate(epoch, certificate)
        return {"certified": certificate.certified, "certified_by": certificate.theorem, "certified_rate": certificate.rate}
