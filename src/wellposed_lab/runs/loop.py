"""Minibatch training: read `fit` from top to bottom."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from wellposed.errors import InvalidArgument
from wellposed_lab.runs.epoch_logger import Books
from wellposed_lab.runs._distributed import World
from wellposed_lab.runs._interruption import Interruption
from wellposed_lab.runs.train_step import TOTALS, Trainee
from wellposed_lab.runs.checkpoint import Checkpoint, Progress, check_point, forget_habits, restore
from wellposed_lab.runs.losses import AbstractLoss
from wellposed_lab.runs.optimizers import learning_rate, length_at, make_optimizer
from wellposed_lab.runs.outcome import Listener, Outcome, Parts
from wellposed_lab.runs.run import Run

if TYPE_CHECKING:
    from wellposed_lab.runs.config import Config

__all__ = ["check_patience", "fit"]


def fit(
    model: nn.Module,
    parts: Parts,
    config: Config,
    *,
    loss: AbstractLoss,
    run: Run | None = None,
    checkpoint: Checkpoint | None = None,
    world: World | None = None,
    listener: Listener | None = None,
) -> Outcome:
    r"""Trains a model on minibatches, in place.

    The loss of a batch is the mean over its items. The order of the samples is a function of `run.seed` and the epoch, and the
    step size of the step, so that from a checkpoint the same numbers follow. With several processes each works on a part of
    every batch and gradients are added up: the numbers differ by rounding only.

    Args:
        model: On the device and of the dtype of the data.
        parts: The data.
        config: Of it `optimizer` and `run` are read here.
        loss: What is minimised.
        run: Where rows, checkpoints and certificates go; None keeps nothing.
        checkpoint: Where to go on.
        world: The processes; one if not given.
        listener: For a progress bar.
    """
    options, world = config.run, World() if world is None else world
    check_patience(config, parts)
    X, y = parts.train
    batch_size = min(options.batch_size or len(X), len(X))
    batches = math.ceil(len(X) / batch_size)
    optimizer = make_optimizer(model, config.optimizer)
    if checkpoint is not None:
        check_point(checkpoint, samples=len(X), batches=batches, totals=len(TOTALS))
    progress = Progress() if checkpoint is None else restore(checkpoint, model, optimizer)
    trainee = Trainee(model, optimizer, loss, config, world)
    outcome = Outcome("epochs", progress)

    def rate_of(step: int) -> float:
        return learning_rate(config.optimizer, step, batches, length_at(options, step, batches))

    books = Books(trainee, parts, run, listener, outcome)

    with Interruption() as interruption, books.events:
        if checkpoint is None:
            books.close_epoch(rate=rate_of(0), began=time.perf_counter())
        while progress.stop is None and progress.epoch < options.epochs:
            began, interrupted = time.perf_counter(), False
            if progress.batch == 0:
                forget_habits(model)  # as after a resume
                progress.order, progress.totals = _order(options.seed, progress.epoch, len(X)), [0.0] * len(TOTALS)
            rate = rate_of(progress.step)
            for rows in progress.order.split(batch_size)[progress.batch :]:
                rate = rate_of(progress.step)
                sums = trainee.step(X, y, rows, rate, interrupted=interruption.asked)
                if sums is None:
                    progress.stop = "not_finite"
                    break
                progress.totals = [a + b for a, b in zip(progress.totals, sums.tolist(), strict=False)]
                progress.step, progress.batch = progress.step + 1, progress.batch + 1
                if listener is not None:
                    listener.on_batch(progress.epoch, progress.batch, batches, float(sums[0] / sums[1]))
                interrupted = bool(sums[-1] > 0)  # some process was asked to stop, so all of them do
                if interrupted and progress.batch < batches:
                    return books.interrupted()
            if progress.stop is not None:
                break
            progress.epoch, progress.batch, progress.order = progress.epoch + 1, 0, progress.order[:0]
            books.close_epoch(rate=rate, began=began)
            if interrupted and progress.stop is None and progress.epoch < options.epochs:
                return books.interrupted()
    outcome.stop = progress.stop or "epochs"
    return outcome


def check_patience(config: Config, parts: Parts) -> None:
    """Raises `InvalidArgument` if early stopping has nothing to watch."""
    if config.run.patience is not None and parts.validation is None:
        raise InvalidArgument(
            "run.patience watches the validation loss: keep samples apart by data.validation=0.2 or the like."
        )


def _order(seed: int, epoch: int, n: int) -> Tensor:
    """(n,) a permutation that is a function of seed and epoch."""
    state = int(np.random.SeedSequence([seed, epoch]).generate_state(1, np.uint64)[0])
    return torch.randperm(n, generator=torch.Generator().manual_seed(state >> 1))
