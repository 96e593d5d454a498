"""[nguyen2022, Figure 4.4]: the loss around weight-tied and equilibrium networks."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from wellposed.landscape import basin, surface
from wellposed_lab.papers.claims import Claim, ClaimFinding, decide, not_tested, spread
from wellposed_lab.papers.datasets import channels_of, images, ten_classes
from wellposed_lab.papers.experiment import AbstractExperiment, ExperimentConfig, Result, Task, values_of
from wellposed_lab.papers.image_training import accuracy, fit
from wellposed_lab.papers.nguyen2022.figure4_2 import residual

__all__ = ["FULL", "LANDSCAPE_RECIPE", "AbstractLandscape", "Figure44", "LandscapeConfig", "contours", "landscape"]

#: "small loss": at most so much above that of the minimizer.
ABOVE = 0.5


@dataclass(frozen=True, kw_only=True)
class LandscapeConfig(ExperimentConfig):
    """Sizes."""

    data: str = "mnist"  # name of a data set
    n: int = 150  # images to train
    n_test: int = 100  # images to test
    n_seen: int = 60  # of those to train, on which the surface is evaluated
    size: int = 14  # of the images
    channels: int = 8  # of the state
    epochs: int = 8  # epochs, batch, lr: of Adam, its step falling along a cosine
    batch: int = 25
    lr: float = 1e-2
    slow: float = 3.0  # cells take steps so many times smaller than encoders and heads
    points: int = 7  # points, radius: of the surface, along each of two filter-normalized directions
    radius: float = 1.0


#: A departure of all landscapes.
LANDSCAPE_RECIPE = (
    "Adam with a step that falls along a cosine to 0, and the norm of the gradient cut at 1. Equilibria are solved by "
    "Anderson's method to a relative residual of 1e-3 with at most 100 evaluations; directions are normalized filter by filter."
)
#: The sizes of --full.
FULL = LandscapeConfig(
    data="cifar10", n=10000, n_test=2000, n_seen=100, size=16, channels=12, epochs=10, batch=100, lr=1e-3, points=51
)


@dataclass(frozen=True, kw_only=True)
class RepeatConfig(LandscapeConfig):
    """Sizes."""

    repeats: tuple[int, ...] = (6, 11, 18)  # how often the explicit networks apply the map


def landscape(model: nn.Module, task: Task, *, penalty: bool = False) -> dict[str, Any]:
    """Trains the model of a task and looks at the loss around where it ended.

    Args:
        model: Is trained.
        task: With the keys of `LandscapeConfig`.
        penalty: Whether to train with the Jacobian penalty of the model.

    Returns:
        `values`: the surface, None where there is no loss that can be believed; `area` of {loss <=
            loss at the centre +
        `ABOVE`} and `undecided` beside it (None without a loss at the centre); `counts` of the
            points by their status; `loss`
        of every epoch; `coordinates`.
    """
    (X, y), (X_test, y_test) = images(task["data"], task["n"], task["n_test"], size=task["size"], seed=task["seed"])
    generator = torch.Generator().manual_seed(task["seed"])
    options = {key: task[key] for key in ("epochs", "batch", "lr", "slow")}
    losses = fit(model, X, y, **options, generator=generator, penalty=penalty)
    n = task["n_seen"]
    generator = torch.Generator().manual_seed(task["seed"] + 1)  # the same directions for all networks of a seed
    found = surface(
        model, cross_entropy, X[:n], y[:n], num=task["points"], radius=task["radius"], generator=generator, probes=min(n, 10)
    )
    middle = task["points"] // 2
    centre = float(found.values[middle, middle])
    known = math.isfinite(centre)
    low = basin(found, level=centre + ABOVE) if known else None
    return {
        "values": [[float(f"{v:.5g}") if math.isfinite(v) else None for v in row] for row in found.values.tolist()],
        "coordinates": found.coordinates[0].tolist(),
        "centre": centre if known else None,
        "area": None if low is None else low.area,
        "undecided": None if low is None else low.undecided,
        "counts": found.counts(),
        "loss": losses,
        "test_accuracy": accuracy(model, X_test, y_test),
    }


class AbstractLandscape(AbstractExperiment):
    """An experiment with a `LandscapeConfig`."""

    def available(self, config: LandscapeConfig) -> tuple[LandscapeConfig, list[str]]:
        data, n, n_test, notes = ten_classes(config.data, config.n, config.n_test)
        return dataclasses.replace(config, data=data, n=n, n_test=n_test), notes


class Figure44(AbstractLandscape):
    """The area of small loss around the network, for growing depth."""

    name = "nguyen2022/figure4.4"
    title = "the loss around weight-tied and equilibrium networks"
    claims = (
        Claim(
            "wider",
            "The neighbourhood of small loss expands with the number of repetitions.",
            "[nguyen2022, Section 4.2.1]",
            f"the area of the loss at most {ABOVE:g} above the centre: its mean rises from each number of repetitions to the "
            "next, and for every seed from the least to the most",
        ),
        Claim(
            "equilibrium",
            "The neighbourhood of small loss is largest for the equilibrium.",
            "[nguyen2022, Section 4.2.1]",
            "its area is greater than that of every number of repetitions, for every seed; not tested if what is undecided "
            "beside it would decide",
        ),
    )
    departures = (
        "The thesis trains on CIFAR-10 for 50 epochs and prints no channels; this is MNIST at 14 x 14, with --full 10,000 "
        "images of CIFAR-10 at 16 x 16, 12 channels and 10 epochs, the surface on 100 images. One recipe for all networks, "
        "without a penalty: cells take smaller steps than encoders and heads (key slow), because otherwise few points of the "
        "surface of the equilibrium network have an equilibrium. Points without one are never counted as low or as high.",
        LANDSCAPE_RECIPE,
    )
    varied = {"repeats": "repeats"}
    quick = RepeatConfig()
    full = RepeatConfig(**vars(FULL))

    def tasks(self, config: RepeatConfig) -> list[Task]:
        equilibrium = dataclasses.replace(config, repeats=(0,))  # takes longest
        return super().tasks(equilibrium) + super().tasks(config)

    def run(self, task: Task) -> dict[str, Any]:
        model = residual(channels_of(task["data"]), task["channels"], task["seed"])
        return landscape(model.twin(task["repeats"]) if task["repeats"] else model, task)

    def judge(self, config: RepeatConfig, results: Sequence[Result]) -> Mapping[str, ClaimFinding]:
        depths = sorted(config.repeats)
        areas = {depth: values_of(results, "area", repeats=depth) for depth in (*depths, 0)}
        lost = [depth for depth, found in areas.items() if any(area is None for area in found)]
        means = {depth: statistics.fmean(found) for depth, found in areas.items() if depth not in lost}
        texts = [f"{_title(depth)}: {spread(found)}" for depth, found in areas.items() if depth not in lost]
        text = "area " + ", ".join(texts)
        numbers = {_title(depth): found for depth, found in areas.items()}
        findings = {}
        if len(depths) < 2 or set(depths) & set(lost):
            findings["wider"] = not_tested("it needs two numbers of repetitions, and a loss at the centre of every surface")
        else:
            rises = all(means[a] < means[b] for a, b in zip(depths, depths[1:], strict=False))
            rises &= all(a < b for a, b in zip(areas[depths[0]], areas[depths[-1]], strict=True))
            findings["wider"] = decide(rises, text, **numbers)
        if lost:
            findings["equilibrium"] = not_tested("some network has no equilibrium at the centre of its surface")
        else:
            most = [max(row) for row in zip(*(areas[depth] for depth in depths), strict=True)]
            undecided = values_of(results, "undecided", repeats=0)
            text += f"; beside that of the equilibrium {spread(undecided)} is undecided"
            larger = all(own > other for own, other in zip(areas[0], most, strict=True))
            possible = all(own + more > other for own, more, other in zip(areas[0], undecided, most, strict=True))
            if possible and not larger:
                findings["equilibrium"] = not_tested(f"the undecided area would decide: {text}")
            else:
                findings["equilibrium"] = decide(larger, text, **numbers, undecided=undecided)
        return findings

    def remarks(self, results: Sequence[Result]) -> list[str]:
        losses = {_title(depth): [loss[-1] for loss in values_of(results, "loss", repeats=depth)] for depth in _depths(results)}
        learned = "loss of the last epoch: " + ", ".join(f"{name} {spread(values)}" for name, values in losses.items())
        bad = sum(count for r in results for status, count in r.values["counts"].items() if status != "VALID")
        points = sum(sum(r.values["counts"].values()) for r in results)
        scores = {_title(depth): values_of(results, "test_accuracy", repeats=depth) for depth in _depths(results)}
        right = "test accuracy: " + ", ".join(f"{name} {spread(values)}" for name, values in scores.items())
        return [
            learned,
            right,
            *([f"{bad} of {points} points of all surfaces have no loss that can be believed"] if bad else []),
        ]

    def panels(self, config: RepeatConfig, results: Sequence[Result]) -> list[dict[str, Any]]:
        seed = min(r.task["seed"] for r in results)
        shown = {
            _title(d): next(r for r in results if r.task["seed"] == seed and r.task["repeats"] == d) for d in _depths(results)
        }
        curves = []
        for depth in _depths(results):
            rows = [values[config.points // 2] for values in values_of(results, "values", repeats=depth)]
            curves.append({"label": _title(depth), "x": results[0].values["coordinates"], "y": rows})
        through = {"title": "through the centre", "x_label": "first direction", "y_label": "loss", "curves": curves}
        return [*contours({name: result.values for name, result in shown.items()}), through]


def contours(found: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A panel for each surface, all with the same colours: from the least loss to 3 above the
    greatest at a centre, where the thesis draws its contours."""
    least = [value for values in found.values() for row in values["values"] for value in row if value is not None]
    centres = [values["centre"] for values in found.values() if values["centre"] is not None]
    limits = [min(least, default=0.0), max(centres, default=0.0) + 3.0]
    return [
        {
            "kind": "contour",
            "title": name,
            "x_label": "first direction",
            "y_label": "second direction",
            "x": values["coordinates"],
            "values": values["values"],
            "limits": limits,
            "level": None if values["centre"] is None else values["centre"] + ABOVE,
        }
        for name, values in found.items()
    ]


def _depths(results: Sequence[Result]) -> list[int]:
    """In the order of the report: the equilibrium last."""
    return sorted({r.task["repeats"] for r in results}, key=lambda depth: depth or math.inf)


def _title(depth: int) -> str:
    return f"repeat-{depth}" if depth else "equilibrium"
