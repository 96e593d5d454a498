"""[nguyen2022, Figure 4.3]: how the way of the iterates changes while the network learns."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from wellposed.landscape import project, trajectory
from wellposed_lab.papers.claims import Claim, ClaimFinding, decide, spread
from wellposed_lab.papers.datasets import accuracy, fit, images, ten_classes
from wellposed_lab.papers.experiment import AbstractExperiment, ExperimentConfig, Result, Task
from wellposed_lab.papers.nguyen2022.figure4_2 import STEADY, residual, wander

__all__ = ["Figure43", "Figure43Config"]


@dataclass(frozen=True, kw_only=True)
class Figure43Config(ExperimentConfig):
    """Sizes."""

    data: str = "mnist"  # name of a data set
    n: int = 200  # images to train
    shown: int = 100  # how many of them are followed
    size: int = 14  # of the images
    channels: int = 8  # of the state
    epochs: int = 4  # epochs, batch, lr: of Adam, its step falling along a cosine
    batch: int = 25
    lr: float = 5e-3


class Figure43(AbstractExperiment):
    """The states of Anderson's solver, at the start and after every epoch, in one plane."""

    name = "nguyen2022/figure4.3"
    title = "the way of the iterates during training"
    claims = (
        Claim(
            "leap",
            "At initialization the trajectory takes a single leap and quickly becomes steady.",
            "[nguyen2022, Section 4.1.2]",
            f"the way after the first step is shorter than {STEADY:g} first steps on average, for every seed",
        ),
        Claim(
            "classes",
            "After the first epoch the states of different classes are in different regions.",
            "[nguyen2022, Section 4.1.2]",
            "after the first epoch more than half of the last states, and more than at the start, are nearest in the plane to "
            "the mean of their class, for every seed",
        ),
        Claim(
            "complex",
            "The dynamic becomes more complex during training.",
            "[nguyen2022, Section 4.1.2]",
            "in first steps the way is longer after the last epoch than after the first one, and there than at the start, for "
            "every seed",
        ),
        Claim(
            "deeper",
            "The network becomes deeper during training: the solver needs more evaluations.",
            "[nguyen2022, Section 4.1.2], after [bai2021]",
            "the mean number of evaluations is greater after the last epoch than at the start, for every seed",
        ),
    )
    departures = (
        "The thesis trains 40 epochs with step 0.001 on all of MNIST and does not print channels, groups or kernel sizes.",
    )
    quick = Figure43Config()
    full = Figure43Config(n=60000, shown=100, size=28, channels=48, epochs=40, batch=100, lr=1e-3)

    def available(self, config: Figure43Config) -> tuple[Figure43Config, list[str]]:
        data, n, _, notes = ten_classes(config.data, config.n, 100)
        return dataclasses.replace(config, data=data, n=n), notes

    def run(self, task: Task) -> dict[str, Any]:
        (X, y), (X_test, y_test) = images(task["data"], task["n"], 100, size=task["size"], seed=task["seed"])
        model = residual(X.shape[1], task["channels"], task["seed"])
        X_shown, y_shown = X[: task["shown"]], y[: task["shown"]]
        ways = [trajectory(model, X_shown)]
        options = {key: task[key] for key in ("epochs", "batch", "lr")}
        generator = torch.Generator().manual_seed(task["seed"])
        losses = fit(model, X, y, **options, generator=generator, each=lambda _: ways.append(trajectory(model, X_shown)))
        plane = project(ways)
        return {
            "wander": [wander(points) for points in plane.points],
            "nearest": [
                _nearest(_last(points, way.num_steps), y_shown.numpy()) for points, way in zip(plane.points, ways, strict=True)
            ],
            "steps": [float(way.num_steps.mean()) for way in ways],
            "unsolved": [int((~way.converged).sum()) for way in ways],
            "loss": losses,
            "test_accuracy": accuracy(model, X_test, y_test),
        }

    def judge(self, config: Figure43Config, results: Sequence[Result]) -> Mapping[str, ClaimFinding]:
        starts, firsts, ends = ([r.values["wander"][i] for r in results] for i in (0, 1, -1))
        before, after = ([r.values["nearest"][i] for r in results] for i in (0, 1))
        few, many = ([r.values["steps"][i] for r in results] for i in (0, -1))
        rises = all(a < b < c for a, b, c in zip(starts, firsts, ends, strict=True))
        ways = f"{spread(starts)} first steps at the start, {spread(firsts)} after one epoch, {spread(ends)} at the end"
        return {
            "leap": decide(max(starts) < STEADY, f"{spread(starts)} first steps", wander=starts),
            "classes": decide(
                all(max(a, 0.5) < b for a, b in zip(before, after, strict=True)),
                f"{spread(before)} at the start, {spread(after)} after one epoch",
                before=before,
                after=after,
            ),
            "complex": decide(rises, ways, start=starts, first=firsts, end=ends),
            "deeper": decide(
                all(a < b for a, b in zip(few, many, strict=True)),
                f"{spread(few)} evaluations at the start, {spread(many)} at the end",
                start=few,
                end=many,
            ),
        }

    def remarks(self, results: Sequence[Result]) -> list[str]:
        scores, losses = [r.values["test_accuracy"] for r in results], [r.values["loss"][-1] for r in results]
        unsolved = sum(sum(r.values["unsolved"]) for r in results)
        learned = f"the networks end with a training loss of {spread(losses)} and {spread(scores)} of test images right"
        return [learned, *([f"{unsolved} of the ways that were followed did not converge"] if unsolved else [])]

    def panels(self, config: Figure43Config, results: Sequence[Result]) -> list[dict[str, Any]]:
        titles = {
            "wander": "way after the first step / first step",
            "nearest": "part nearest to own class",
            "steps": "evaluations",
        }
        return [
            {
                "title": key,
                "x_label": "epoch",
                "y_label": label,
                "curves": [{"label": config.data, "x": list(range(config.epochs + 1)), "y": [r.values[key] for r in results]}],
            }
            for key, label in titles.items()
        ]


def _last(points: np.ndarray, num_steps: np.ndarray) -> np.ndarray:
    """(batch, k) where each sample ended."""
    ends: np.ndarray = points[num_steps - 1, np.arange(points.shape[1])]
    return ends


def _nearest(ends: np.ndarray, classes: np.ndarray) -> float:
    """The part of points that are nearest to the mean of their class."""
    known = np.unique(classes)
    means = np.stack([ends[classes == c].mean(axis=0) for c in known])
    nearest = known[np.linalg.norm(ends[:, None] - means[None], axis=2).argmin(axis=1)]
    return float((nearest == classes).mean())
