"""Optimizers and step sizes by name."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from wellposed_lab.runs.config import OptimizerSection, RunSection

__all__ = ["learning_rate", "length_at", "make_optimizer"]


def make_optimizer(model: nn.Module, options: OptimizerSection) -> torch.optim.Optimizer:
    """SGD, Adam or AdamW on the parameters that require a gradient."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decay = options.weight_decay
    if options.name == "sgd":
        return torch.optim.SGD(trained, lr=options.lr, momentum=options.momentum, weight_decay=decay)
    kind = torch.optim.Adam if options.name == "adam" else torch.optim.AdamW
    return kind(trained, lr=options.lr, betas=(options.beta1, options.beta2), weight_decay=decay)


def learning_rate(options: OptimizerSection, step: int, batches: int, epochs: int) -> float:
    r"""The step size of a step: a function of its number, so that a schedule has no state to lose.

    Constant: lr. Step: lr factor^floor(epoch/every). Cosine: lr (1 + cos(pi k/K))/2 at step k of K = epochs * batches. All
    grow linearly over the first `warmup` epochs.

    Args:
        options: With the name of the schedule.
        step: How many steps were taken.
        batches: Steps of an epoch.
        epochs: Of the whole run; of the part that the step belongs to (`length_at`), if the run was extended.
    """
    rate = options.lr
    if options.schedule == "step":
        rate *= options.step_factor ** (step // batches // options.step_every)
    elif options.schedule == "cosine":
        rate *= 0.5 * (1 + math.cos(math.pi * step / (epochs * batches)))
    warm = options.warmup * batches
    return rate * (step + 1) / warm if step < warm else rate


def length_at(options: RunSection, step: int, batches: int) -> int:
    """The length in epochs that the schedule of a step has: of a run that was extended, the least that the step is within."""
    return next((length for length in options.extended if step < length * batches), options.epochs)
