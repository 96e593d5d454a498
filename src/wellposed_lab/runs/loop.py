"""Minibatch training: read `fit` from top to bottom; then a step, optimizers, learning rates."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from wellposed.descent._minibatch import TOTALS, epoch, solves
from wellposed.errors import InvalidArgument
from wellposed_lab.runs.epoch_logger import EpochLogger, Listener, RunOutcome
from wellposed_lab.runs.losses import AbstractLoss, by_few_steps
from wellposed_lab.runs.processes import Interruption, World
from wellposed_lab.runs.training_state import Checkpoint, Progress, check_reachable, forget_tuned_values, restore

if TYPE_CHECKING:
    from wellposed_lab.runs.config_sections import OptimizerSection, RunConfig, RunSection
    from wellposed_lab.runs.run import Run
    from wellposed_lab.runs.setup import DataParts

__all__ = ["TrainStep", "check_patience", "fit", "learning_rate", "make_optimizer"]

#: Samples at once in evaluations, unless the batches are larger.
EVALUATED_AT_ONCE = 1024


def fit(
    model: nn.Module,
    parts: DataParts,
    config: RunConfig,
    *,
    loss: AbstractLoss,
    run: Run | None = None,
    checkpoint: Checkpoint | None = None,
    world: World | None = None,
    listener: Listener | None = None,
) -> RunOutcome:
    r"""Trains a model on minibatches, in place.

    The loss of a batch is the mean over its items. The order of the samples is a function of
    `run.seed` and the epoch, and the learning rate a function of the step, so a resumed run has the
    same numbers. With several processes each works on a part of every batch and Lightning Fabric
    adds the gradients up: the numbers differ by rounding only.

    Args:
        model: On the device and of the dtype of the data.
        parts: The data.
        config: Its sections `optimizer` and `run` are read here.
        loss: What is minimised.
        run: Where rows, checkpoints and certificates are written; None writes nothing.
        checkpoint: Where to continue.
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
        check_reachable(checkpoint, samples=len(X), batches=batches, totals=len(TOTALS))
    progress = Progress() if checkpoint is None else restore(checkpoint, model, optimizer)
    train_step = TrainStep(model, optimizer, loss, config, world)
    finished = checkpoint is not None and (progress.stop is not None or progress.epoch >= options.epochs)
    outcome = RunOutcome("epochs", progress, finished_before=finished)
    logger = EpochLogger(train_step, parts, run, listener, outcome)

    def rate_of(step: int) -> float:
        return learning_rate(config.optimizer, step, batches, _length_at(options, step, batches))

    def step(rows: Tensor) -> Tensor | None:
        return train_step(X, y, rows, rate_of(progress.step), interrupted=interruption.asked)

    with Interruption(world.grace) as interruption, logger:
        if checkpoint is None:
            logger.close_epoch(rate=rate_of(0), began=time.perf_counter())
        while progress.stop is None and progress.epoch < options.epochs:
            began, interrupted = time.perf_counter(), False
            if progress.batch == 0:
                forget_tuned_values(model)  # as after a resume
                progress.order, progress.totals = _order(options.seed, progress.epoch, len(X)), [0.0] * len(TOTALS)
            rate = rate_of(progress.step)
            for sums in epoch(step, progress.order.split(batch_size)[progress.batch :], progress.totals):
                if sums is None:
                    progress.stop = "not_finite"
                    break
                rate = rate_of(progress.step)
                progress.step, progress.batch = progress.step + 1, progress.batch + 1
                if listener is not None:
                    listener.on_batch(progress.epoch, progress.batch, batches, float(sums[0] / sums[1]))
                interrupted = bool(sums[-1] > 0)  # one process was asked to stop, so all of them do
                if interrupted and progress.batch < batches:
                    return logger.interrupted()
            if progress.stop is not None:
                break
            progress.epoch, progress.batch, progress.order = progress.epoch + 1, 0, progress.order[:0]
            logger.close_epoch(rate=rate, began=began)
            if interrupted and progress.stop is None and progress.epoch < options.epochs:
                return logger.interrupted()
        train_step.collect()
    outcome.stop = progress.stop or "epochs"
    return outcome


def check_patience(config: RunConfig, parts: DataParts) -> None:
    """Raises `InvalidArgument` if early stopping has no validation loss."""
    if config.run.patience is not None and parts.validation is None:
        raise InvalidArgument(
            "run.patience watches the validation loss: keep samples apart by data.validation=0.2 or the like."
        )


def _order(seed: int, epoch: int, n: int) -> Tensor:
    """(n,) a permutation that is a function of seed and epoch."""
    state = int(np.random.SeedSequence([seed, epoch]).generate_state(1, np.uint64)[0])
    return torch.randperm(n, generator=torch.Generator().manual_seed(state >> 1))


@dataclass
class TrainStep:
    """One step of the optimizer, and evaluations; the attributes are those of `fit`."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: AbstractLoss
    config: RunConfig
    world: World

    def __post_init__(self) -> None:
        self.by_few_steps = by_few_steps(self.model.train(), self.config.loss.residual)
        options = self.config.optimizer.clip, self.config.loss
        self._step = self.world.step(self.model, self.optimizer, self.loss, *options)

    def __call__(self, X: Tensor, y: Tensor, rows: Tensor, rate: float, *, interrupted: bool) -> Tensor | None:
        """A step on these rows; the last sum counts interrupted processes."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return self._step(X, y, rows, float(interrupted))

    def collect(self) -> None:
        """Makes the model the same in all processes, and whole where shards of it are trained."""
        if collect := getattr(self._step, "collect", None):
            collect()

    @torch.no_grad()
    def evaluate(self, X: Tensor, y: Tensor) -> dict[str, float]:
        """The loss and the measures on a part of the data, over all processes; of a network that
        trains by few steps also how its equilibria were found, which training does not show."""
        self.model.eval()
        size = max(EVALUATED_AT_ONCE, self.config.run.batch_size or 0)
        sums: Tensor | None = None
        for rows in self.world.part(torch.arange(len(X))).split(size):
            x, target = X[rows.to(X.device)], y[rows.to(y.device)]
            output = self.model(x)
            head = torch.tensor([float(self.loss.total(output, target)), self.loss.count(target)], dtype=torch.float64)
            found = torch.tensor(solves(self.model) if self.by_few_steps else (), dtype=torch.float64)
            part = torch.cat([head, found, self.loss.tally(output, target).cpu()])
            sums = part if sums is None else sums + part
        if sums is None:  # fewer samples than processes
            output, target = self.model(X[:1]), y[:1]
            sums = torch.zeros(2 + 3 * self.by_few_steps + len(self.loss.tally(output, target)), dtype=torch.float64)
        sums = self.world.add(sums)
        count, measures = int(sums[1]), {"loss": float(sums[0]) / max(int(sums[1]), 1)}
        if self.by_few_steps:
            steps, solved, failed = sums[2:5].tolist()
            measures |= {"equilibrium_steps": steps / max(solved, 1.0), "unconverged": int(failed)}
            sums = torch.cat([sums[:2], sums[5:]])
        return {**measures, **self.loss.measures(sums[2:], count)}


def make_optimizer(model: nn.Module, options: OptimizerSection) -> torch.optim.Optimizer:
    """SGD, Adam or AdamW on the parameters that require a gradient."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decay = options.weight_decay
    if options.name == "sgd":
        return torch.optim.SGD(trained, lr=options.lr, momentum=options.momentum, weight_decay=decay)
    kind = torch.optim.Adam if options.name == "adam" else torch.optim.AdamW
    return kind(trained, lr=options.lr, betas=(options.beta1, options.beta2), weight_decay=decay)


def learning_rate(options: OptimizerSection, step: int, batches: int, epochs: int) -> float:
    r"""The learning rate of a step.

    Constant: lr. Step: lr factor^floor(epoch/every). Cosine: lr (1 + cos(pi k/K))/2 at step k of
    K = epochs * batches. All grow linearly over the first `warmup` epochs.

    These are the rates of torch's `StepLR`, `CosineAnnealingLR` and `LinearLR`, written as
    functions of the step, because torch computes each rate from the one before: a run that is
    resumed would then not repeat its numbers bit for bit, and a cosine that has come to 0 stays
    there however long the run is made.

    Args:
        options: With the name of the schedule.
        step: Steps taken so far.
        batches: Steps of an epoch.
        epochs: Of the run; of an extended run, the length that `_length_at` gives for the step.
    """
    rate = options.lr
    if options.schedule == "step":
        rate *= options.step_factor ** (step // batches // options.step_every)
    elif options.schedule == "cosine":
        rate *= 0.5 * (1 + math.cos(math.pi * step / (epochs * batches)))
    warm = options.warmup * batches
    return rate * (step + 1) / warm if step < warm else rate


def _length_at(options: RunSection, step: int, batches: int) -> int:
    """The length of the schedule: of an extended run, the least that contains the step."""
    return next((length for length in options.extended if step < length * batches), options.epochs)
