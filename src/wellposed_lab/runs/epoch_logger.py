"""After every epoch: a row of metrics, a certificate, the decision to stop, a checkpoint."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from wellposed._io import writing
from wellposed.certify import Certificate, certify
from wellposed.certify._dispatch import WELL_POSED, has_certificate
from wellposed.certify.own_layer import has_layers
from wellposed.errors import RunError, how_to_install
from wellposed_lab.runs.checkpoint import prune, save
from wellposed_lab.runs.own_class import OwnNetwork
from wellposed_lab.runs.training_state import Checkpoint, Progress, capture

if TYPE_CHECKING:
    from wellposed_lab.runs.loop import TrainStep
    from wellposed_lab.runs.run import Run
    from wellposed_lab.runs.setup import DataParts

__all__ = ["STOPS", "EpochLogger", "Events", "Listener", "RunOutcome", "certificate_of"]

#: Why a run ended, in words.
STOPS = {
    "epochs": "all epochs are done",
    "patience": "the validation loss did not get better",
    "stop_loss": "the training loss is small enough",
    "not_finite": "the loss or a gradient became NaN or infinite; the parameters are those before",
    "interrupted": "it was interrupted",
}

#: Theorems of a network that is known by its equilibrium layers alone.
OF_LAYERS = ("auto", "well_posed", *WELL_POSED)


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
        finished_before: Whether the run had ended before this session, which then trained nothing.
    """

    stop: str
    progress: Progress
    rows: list[dict[str, Any]] = field(default_factory=list)
    certificate: Certificate | None = None
    finished_before: bool = False


class EpochLogger:
    """Writes what an epoch gave. Only the first process writes, but all make the same decisions."""

    def __init__(
        self, train_step: TrainStep, parts: DataParts, run: Run | None, listener: Listener | None, outcome: RunOutcome
    ) -> None:
        self.train_step, self.parts, self.listener, self.outcome = train_step, parts, listener, outcome
        self.run = run if train_step.world.first else None
        self.options, self.progress = train_step.config.run, outcome.progress
        # what was written about later epochs does not count
        self._events = Events(self.run, enabled=self.options.tensorboard, after=self.progress.epoch)

    def __enter__(self) -> EpochLogger:
        self._events.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._events.__exit__(kind, *rest)

    def close_epoch(self, *, rate: float, began: float) -> None:
        """A row, a certificate if one is due, the decision to stop, a checkpoint; in this order."""
        self.train_step.collect()
        progress, options = self.progress, self.options
        last = progress.epoch == options.epochs
        row: dict[str, Any] = {"epoch": progress.epoch, "step": progress.step, "learning_rate": rate}
        if progress.totals:
            loss, items, steps, solved, failed = progress.totals
            row["batch_loss"] = loss / max(items, 1.0)
            row |= {"equilibrium_steps": steps / solved} if solved else {}
            row |= {"unconverged": int(failed)} if solved and not self.train_step.by_few_steps else {}
        if progress.epoch % options.evaluate_every == 0 or last:
            for name, (X, y) in self.parts.items():
                row |= {f"{name}_{key}": value for key, value in self.train_step.evaluate(X, y).items()}
        better = self._judge(row)
        last = last or progress.stop is not None
        if options.certify_every and (progress.epoch % options.certify_every == 0 or last):
            row |= self._certify(progress.epoch, last=last)
        progress.totals = []
        self.outcome.rows.append(row)
        if self.run is not None:
            self.run.append(row, time.perf_counter() - began)
            self._events.add(row)
            if better and options.patience is not None:
                save(self._captured(), self.run.folder / "checkpoints", "best")
        if progress.epoch % options.checkpoint_every == 0 or last:
            self.checkpoint()
        if self.listener is not None:
            self.listener.on_epoch(row)

    def interrupted(self) -> RunOutcome:
        """Saves the state within an epoch."""
        self.train_step.collect()
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

    def _certify(self, epoch: int, *, last: bool) -> dict[str, Any]:
        """Entries of the row. The first process certifies, with all training samples."""
        model, theorem = self.train_step.model, self.options.theorem
        if not _is_due(model, theorem, last=last) or not self.train_step.world.first:
            return {}
        certificate = certificate_of(model, *self.parts.train, theorem)
        assert certificate is not None
        self.outcome.certificate = certificate
        if self.run is not None:
            self.run.add_certificate(epoch, certificate)
        return {"certified": certificate.certified, "certified_by": certificate.theorem, "certified_rate": certificate.rate}


class Events:
    """Writes the numbers of every row to `tensorboard/` of a run, as a context.

    Args:
        run: Where; None writes nothing.
        enabled: Whether to write at all.
        after: The epoch that a resumed run continues from: what was written about later ones does
            not count.
    """

    def __init__(self, run: Run | None, *, enabled: bool, after: int) -> None:
        self._run, self._after = run if enabled else None, after
        self._writer: Any = None
        self._hook = threading.excepthook

    def __enter__(self) -> Events:
        self._hook, threading.excepthook = threading.excepthook, self._on_thread_error
        try:
            self._writer = self._opened()
        except BaseException:
            self._give_back_hook()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if self._writer is not None:
                # after another error a full disk is not news
                with contextlib.suppress(RunError) if kind is not None else contextlib.nullcontext(), self._writing():
                    self._writer.close()
        finally:
            self._give_back_hook()

    def _opened(self) -> Any:
        """A writer; None if there cannot be one, which the log says."""
        if self._run is None:
            return None
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            self._run.log(f"No events are written: TensorBoard is not installed; {how_to_install('runs')}.")
            return None
        folder = str(self._run.folder / "tensorboard")
        if not _is_utf8(folder):
            self._run.log("No events are written: TensorBoard needs a run directory whose name is UTF-8.")
            return None
        with self._writing():
            return SummaryWriter(folder, purge_step=self._after + 1 if self._after else None)

    def _writing(self) -> contextlib.AbstractContextManager[None]:
        assert self._run is not None
        return writing(self._run.folder / "tensorboard")

    def _on_thread_error(self, args: Any) -> None:
        """TensorBoard writes in a thread, whose errors come back by the next call: they are not
        printed as well."""
        if not (_is_writer(args.thread) and isinstance(args.exc_value, OSError)):
            self._hook(args)

    def _give_back_hook(self) -> None:
        for thread in threading.enumerate():
            if _is_writer(thread) and getattr(thread, "exception", None) is not None:
                thread.join(timeout=5)  # it is about to end, by the hook
        threading.excepthook = self._hook

    def add(self, row: dict[str, Any]) -> None:
        """One scalar for every number of the row."""
        if self._writer is None:
            return
        with self._writing():
            for name, value in row.items():
                if name != "epoch" and isinstance(value, (int, float)):
                    part, _, measure = name.partition("_")
                    tag = f"{measure}/{part}" if part in ("train", "validation", "test") else name
                    self._writer.add_scalar(tag, float(value), row["epoch"])
            self._writer.flush()


def _is_writer(thread: object) -> bool:
    return type(thread).__module__.startswith("tensorboard.")


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def certificate_of(model: nn.Module, X: Any, y: Tensor, theorem: str = "auto") -> Certificate | None:
    """The certificate; None if no theorem of this name is about the network.

    Networks of the theory are certified with their data. Of others with equilibrium layers, what is
    proved for every input.

    Args:
        model: At its present parameters.
        X, y: The training samples.
        theorem: As for `wellposed.certify`.
    """
    if has_certificate(model):
        return certify(model, X, y, theorem=theorem)
    if has_layers(model) and theorem in OF_LAYERS:
        return certify(model, theorem=theorem)
    return None


def _is_due(model: nn.Module, theorem: str, *, last: bool) -> bool:
    """Whether training certifies a network after this epoch.

    A network of one's own is certified at the end of the run only: where nothing is proved, that
    can take half a minute. The networks of `models.MODELS` without a theorem are left out: they are
    not certified.

    Args:
        model, theorem: As for `certificate_of`.
        last: Whether this is the last epoch.
    """
    return has_certificate(model) or (last and isinstance(model, OwnNetwork) and has_layers(model) and theorem in OF_LAYERS)
