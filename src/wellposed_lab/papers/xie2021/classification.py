"""Classification by the networks of [xie2021]: sizes, and one training for all tables."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from wellposed.convex import ConvOptEq
from wellposed_lab.papers.datasets import channels_of, images, ten_classes
from wellposed_lab.papers.experiment import AbstractExperiment, ExperimentConfig, Result, Task
from wellposed_lab.papers.image_training import accuracy, fit
from wellposed_lab.papers.xie2021.networks import AveragedOptEq, count, network

__all__ = ["ALPHAS", "AbstractTable", "ConvConfig", "Row", "opteq_row"]

#: Those of the tables.
ALPHAS = (0.01, 0.1, 0.4, 0.8, 1.0)
#: What a row of a table is about: the keys of a task that name a network.
Row = dict[str, Any]
DEPARTURES = (
    "The paper trains on all of CIFAR-10 at 32 x 32 for 200 epochs; here, with --full, on 10,000 images at 16 x 16 for 8 "
    "epochs, with a stride of 2 in the extractor and 2,000 test images; without --full on MNIST at 8 x 8.",
    "SGD with momentum 0.9, step 0.1, weight decay 3e-4 and batches of 128 as in the paper; the step falls along a cosine, "
    "where the paper multiplies it by 0.6 every 20 epochs; the norm of the gradient is cut at 1.",
    "The paper prints neither the channels of the state nor those of the features: 32 and 26 (25 in Table 1b) give its number "
    "of parameters within 1%. Kernels stay in a ball of norm 0.95, of which the paper says nothing.",
)


@dataclass(frozen=True, kw_only=True)
class ConvConfig(ExperimentConfig):
    """Sizes."""

    data: str = "mnist"  # name of a data set
    images: int = 300  # images, test_images: how many, of ten classes
    test_images: int = 400
    size: int = 8  # of the images
    stride: int = 1  # of the extractor
    channels: tuple[int, ...] = (6, 8, 10, 12, 16)  # of the layers of the deep OptEq
    state_channels: int = 8  # of its state
    feature_channels: int = 8  # of what the extractor gives
    epochs: int = 4  # epochs, batch, lr, weight_decay: of SGD with momentum, the step falling along a cosine
    batch: int = 20
    lr: float = 0.1
    weight_decay: float = 3e-4


#: The sizes of a full run.
FULL: dict[str, Any] = {
    "data": "cifar10",
    "images": 10000,
    "test_images": 2000,
    "size": 16,
    "stride": 2,
    "state_channels": 32,
    "feature_channels": 26,
    "epochs": 8,
    "batch": 128,
}


def opteq_row(alpha: float, regularizer: str = "none", weight: float = 1.0, **changes: Any) -> Row:
    """A deep OptEq with the implicit gradient; `changes` replace "network" and "gradient"."""
    row = {"network": "opteq", "alpha": alpha, "regularizer": regularizer, "weight": weight, "gradient": "implicit"}
    return {**row, **changes}


class AbstractTable(AbstractExperiment):
    """A table whose rows are networks; results of a row serve all tables that have it."""

    tasks_of = "xie2021/classification"
    departures: ClassVar[tuple[str, ...]] = DEPARTURES

    def available(self, config: Any) -> tuple[Any, list[str]]:
        data, n, n_test, notes = ten_classes(config.data, config.images, config.test_images)
        return dataclasses.replace(config, data=data, images=n, test_images=n_test), notes

    def rows(self, config: Any) -> dict[str, Row]:
        """The rows by their names."""
        raise NotImplementedError

    def tasks(self, config: Any) -> list[Task]:
        """By seed, then by row; two rows of one network are one task."""
        rows = list(self.rows(config).values())
        shared = config.part(*(field.name for field in dataclasses.fields(ConvConfig) if field.name != "seeds"))
        unique = [row for i, row in enumerate(rows) if row not in rows[:i]]
        return [{**row, "seed": seed, **shared} for seed in config.seeds for row in unique]

    def run(self, task: Task) -> dict[str, Any]:
        return learned(task)

    def named(self, config: Any, results: list[Result] | Any, key: str) -> dict[str, list[float]]:
        """A measurement by row, one for each seed."""
        ordered = sorted(results, key=lambda r: r.task["seed"])
        return {
            name: [r.values[key] for r in ordered if all(r.task.get(k) == v for k, v in row.items())]
            for name, row in self.rows(config).items()
        }

    def scores(self, config: Any, results: Any) -> dict[str, list[float]]:
        """Test accuracies by row, one for each seed."""
        return self.named(config, results, "test_accuracy")

    def remarks(self, results: Any) -> list[str]:
        sizes = sorted({r.values["parameters"] for r in results})
        solved = [r.values["solved"] for r in results if r.values["solved"] is not None]
        few = (
            [f"in one row only {min(solved):.3g} of the test images have an equilibrium"] if min(solved, default=1) < 1 else []
        )
        return [f"parameters from {sizes[0]} to {sizes[-1]}", *few]


def learned(task: Task) -> dict[str, Any]:
    """Trains the network of a task, and says what it knows of test images.

    Returns:
        `loss` of every epoch, `test_accuracy`, `parameters`; for an OptEq `mean_abs` and
            `mean_square` of its features on (up to) 200
        test images; `solved`, the part of these with an equilibrium, None without a solver.
    """
    (X, y), (X_test, y_test) = images(task["data"], task["images"], task["test_images"], size=task["size"], seed=task["seed"])
    model = network(channels_of(task["data"]), task)
    options = {key: task[key] for key in ("epochs", "batch", "lr", "weight_decay")}
    denormal = torch.set_flush_denormal(True)  # cotangents of an unrolled contraction become subnormal, which is slow
    losses = fit(model, X, y, **options, generator=torch.Generator().manual_seed(task["seed"]), sgd=True)
    score = accuracy(model, X_test, y_test)
    found: dict[str, Any] = {"mean_abs": None, "mean_square": None, "solved": None}
    with torch.no_grad():
        model(X_test[:200])
        layer = getattr(model, "layer", None)
        if layer is not None and layer.last_solution is not None:
            found["solved"] = float(layer.last_solution.converged.double().mean())
        method = {AveragedOptEq: "state", ConvOptEq: "equilibrium"}.get(type(model))
        if method is not None:
            z = getattr(model, method)(X_test[:200])
            found["mean_abs"], found["mean_square"] = float(z.abs().mean()), float(z.square().mean())
    if denormal:
        torch.set_flush_denormal(False)
    return {"loss": losses, "test_accuracy": score, "parameters": count(model), **found}
