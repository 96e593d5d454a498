"""Networks trained on images in minibatches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from wellposed.descent._minibatch import TOTALS, MinibatchStep, epoch

__all__ = ["accuracy", "fit"]

Loss = Callable[[Tensor, Tensor], Tensor]


def fit(
    model: nn.Module,
    X: Tensor,
    y: Tensor,
    *,
    epochs: int,
    batch: int,
    lr: float,
    generator: torch.Generator,
    sgd: bool = False,
    weight_decay: float = 0.0,
    poly: bool = False,
    loss: Loss = cross_entropy,
    slow: float = 1.0,
    penalty: bool = False,
    each: Callable[[int], Any] | None = None,
) -> list[float]:
    """Trains in minibatches, the step falling along a cosine; the mean loss of every epoch.

    Args:
        model: Is trained. X, y: All samples.
        epochs, batch: How often, and how many at a time.
        lr: The step at the start.
        generator: Of the order.
        sgd: SGD with momentum 0.9 in the place of Adam.
        weight_decay: xi of xi |theta|^2/2.
        poly: The step falls like (1 - t)^0.9 instead.
        loss: Of outputs and targets, a mean over samples.
        slow: The `cell` of the network takes steps so many times smaller than the rest. A cell that
            moves fast soon loses the equilibria of some images.
        penalty: Whether to add the Jacobian penalty of the network.
        each: Called with the number of epochs after each of them.
    """
    parameters = list(model.parameters())
    cell = {id(parameter) for parameter in getattr(model, "cell").parameters()} if slow != 1 else set()  # noqa: B009 (any module)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if id(p) not in cell]},
        {"params": [p for p in parameters if id(p) in cell], "lr": lr / slow},
    ]
    decay: dict[str, Any] = {"weight_decay": weight_decay}
    optimizer = torch.optim.SGD(groups, lr, momentum=0.9, **decay) if sgd else torch.optim.Adam(groups, lr, **decay)
    steps = epochs * -(-len(X) // batch)
    kinds: Any = torch.optim.lr_scheduler
    schedule = kinds.PolynomialLR(optimizer, steps, power=0.9) if poly else kinds.CosineAnnealingLR(optimizer, steps)
    penalized: Any = getattr(model, "penalized") if penalty else None  # noqa: B009 (any module)
    losses: list[float] = []

    def objective(x: Tensor, target: Tensor) -> tuple[Tensor, float]:
        """Mean loss and penalty, as of one item; keeps the sum of the losses without penalty."""
        prediction, extra = (model(x), 0.0) if penalized is None else penalized(x, generator=generator)
        value = loss(prediction, target)
        losses[-1] += float(value.detach()) * len(x)
        return value + extra, 1.0

    step = MinibatchStep(model, optimizer, objective, clip=1.0)
    for number in range(1, epochs + 1):
        losses.append(0.0)
        order = torch.randperm(len(X), generator=generator)
        for _ in epoch(lambda rows: step(X, y, rows), order.split(batch), [0.0] * len(TOTALS)):
            schedule.step()
        losses[-1] /= len(X)
        if each is not None:
            each(number)
    model.eval()
    return losses


@torch.no_grad()
def accuracy(model: nn.Module, X: Tensor, y: Tensor) -> float:
    """The part of samples whose greatest output is that of their class."""
    parts = zip(X.split(100), y.split(100), strict=True)
    return sum(int((model(rows).argmax(dim=1) == classes).sum()) for rows, classes in parts) / len(X)
