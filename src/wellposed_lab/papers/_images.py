"""Images of several classes, and networks trained on them in minibatches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from wellposed.data import load
from wellposed.data.files import digits, read
from wellposed_lab.papers._samples import at_hand

__all__ = ["accuracy", "fit", "images", "ten_classes"]


def ten_classes(name: str, n: int, n_test: int) -> tuple[str, int, int, list[str]]:
    """The data set, or digits if it is not at hand; sizes that it has, the same number of each class; and notes.

    Args:
        name: Of the data set.
        n, n_test: What is asked for.
    """
    (found,), _, _, notes = at_hand((name,), 2, 2, paper="gao2022")
    parts, _ = digits() if found == "digits" else read(found)
    most, most_test = (10 * int(np.bincount(parts[key], minlength=10).min()) for key in ("y_train", "y_test"))
    if n > most or n_test > most_test:
        notes.append(
            f"{found} has {most} images to train and {most_test} to test, the same number of each class; {n} and {n_test} were "
            "asked for"
        )
    return found, min(n, most), min(n_test, most_test), notes


def images(
    name: str, n: int, n_test: int, *, size: int, seed: int, classes: int = 10
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(X, y) to train and to test: (n, channels, size, size), every channel standardised, and class indices.

    Args:
        name: Of the data set.
        n, n_test: How many.
        size: Of the images.
        seed: Of the choice.
        classes: The first so many, at least 3.
    """
    data = load(name, n, tuple(range(classes)), seed=seed, n_test=n_test, size=size, flatten=False)
    assert data.X_test is not None and data.y_test is not None
    mean, spread = data.X.mean(dim=(0, 2, 3), keepdim=True), data.X.std(dim=(0, 2, 3), keepdim=True)
    return ((data.X - mean) / spread, data.y), ((data.X_test - mean) / spread, data.y_test)


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
    steady: bool = False,
    each: Callable[[int], Any] | None = None,
) -> list[float]:
    """Cross-entropy in minibatches, the step falling along a cosine; the mean loss of every epoch.

    Args:
        model: Is trained. X, y: All samples.
        epochs, batch: How often, and how many at a time.
        lr: The step at the start.
        generator: Of the order.
        sgd: SGD with momentum 0.9 in the place of Adam.
        steady: For networks with a `cell`: it takes steps 30 times smaller than the rest, and a Jacobian penalty is added where
            the network has one. A cell that moves fast soon loses the equilibria of some images.
        each: Called with the number of epochs after each of them.
    """
    parameters = list(model.parameters())
    slow = {id(parameter) for parameter in getattr(model, "cell").parameters()} if steady else set()  # noqa: B009 (any module)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if id(p) not in slow]},
        {"params": [p for p in parameters if id(p) in slow], "lr": lr / 30},
    ]
    optimizer = torch.optim.SGD(groups, lr, momentum=0.9) if sgd else torch.optim.Adam(groups, lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * -(-len(X) // batch))
    penalized: Any = getattr(model, "penalized", None) if steady else None
    losses = []
    for epoch in range(1, epochs + 1):
        total = 0.0
        for rows in torch.randperm(len(X), generator=generator).split(batch):
            prediction, penalty = (model(X[rows]), 0.0) if penalized is None else penalized(X[rows], generator=generator)
            loss = cross_entropy(prediction, y[rows])
            optimizer.zero_grad()
            (loss + penalty).backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            schedule.step()
            total += float(loss.detach()) * len(rows)
        losses.append(total / len(X))
        if each is not None:
            each(epoch)
    return losses


@torch.no_grad()
def accuracy(model: nn.Module, X: Tensor, y: Tensor) -> float:
    """The part of samples whose greatest output is that of their class."""
    parts = zip(X.split(100), y.split(100), strict=True)
    return sum(int((model(rows).argmax(dim=1) == classes).sum()) for rows, classes in parts) / len(X)
