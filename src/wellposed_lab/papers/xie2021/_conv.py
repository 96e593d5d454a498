"""Convolutional networks on images, as in the tables of [xie2021]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from wellposed.convex import ConvOptEq
from wellposed_lab.papers._config import Config
from wellposed_lab.papers._experiment import Task
from wellposed_lab.papers._images import accuracy, fit, images

__all__ = ["ENOUGH", "ConvConfig", "conv_opteq", "learned"]

#: Test images from which on a difference of one percent is more than chance: its standard error is then 0.5%.
ENOUGH = 10000


@dataclass(frozen=True, kw_only=True)
class ConvConfig(Config):
    """Sizes.

    Attributes:
        data: Name of a data set.
        images, test_images: How many, of ten classes.
        size: Of the images.
        channels: Of the layers of the deep OptEq.
        state_channels: Of its state and of its features.
        epochs, batch, lr: Of SGD with momentum, the step falling along a cosine.
    """

    data: str = "mnist"
    images: int = 300
    test_images: int = 400
    size: int = 8
    channels: tuple[int, ...] = (6, 8, 10, 12, 16)
    state_channels: int = 8
    epochs: int = 4
    batch: int = 20
    lr: float = 0.1


KEYS = ("data", "images", "test_images", "size", "channels", "state_channels", "epochs", "batch", "lr")


def conv_opteq(in_channels: int, task: Task, **options: Any) -> ConvOptEq:
    """The deep OptEq of a task.

    Args:
        in_channels: Of the images.
        task: With `channels`, `state_channels` and `seed`.
        options: As in `ConvOptEq`.
    """
    solving: dict[str, Any] = {"rtol": 1e-3, "max_steps": 100, "on_failure": "ignore"}
    width = task["state_channels"]
    made = {"state_channels": width, "feature_channels": width, "generator": torch.Generator().manual_seed(task["seed"])}
    with torch.random.fork_rng():  # extractor and head draw from the global generator
        torch.manual_seed(task["seed"])
        return ConvOptEq(in_channels, tuple(task["channels"]), **made, **solving, **options)


def learned(model: nn.Module, task: Task) -> dict[str, Any]:
    """Trains a network of ten outputs, and says what it knows of test images."""
    (X, y), (X_test, y_test) = images(task["data"], task["images"], task["test_images"], size=task["size"], seed=task["seed"])
    options = {key: task[key] for key in ("epochs", "batch", "lr")}
    losses = fit(model, X, y, **options, generator=torch.Generator().manual_seed(task["seed"]), sgd=True)
    size = sum(parameter.numel() for parameter in model.parameters())
    return {"loss": losses, "test_accuracy": accuracy(model, X_test, y_test), "parameters": size}
