"""[nguyen2022, Figure 4.4]: the loss around weight-tied and equilibrium networks."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from wellposed.landscape import CellStatus, Surface, basin, filter_normalized, random_direction, surface
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
            loss at the centre + `ABOVE`} and `undecided` beside it (None without a loss at the
            centre); `counts` of the points by their status; `loss` of every epoch; `coordinates`.
            `reached`: `values`, `centre` and `area` as the thesis computes them, see `reached`;
            None where every point has a loss that can be believed.
    """
    (X, y), (X_test, y_test) = images(task["data"], task["n"], task["n_test"], size=task["size"], seed=task["seed"])
    generator = torch.Generator().manual_seed(task["seed"])
    options = {key: task[key] for key in ("epochs", "batch", "lr", "slow")}
    losses = fit(model, X, y, **options, generator=generator, penalty=penalty)
    n = task["n_seen"]
    generator = torch.Generator().manual_seed(task["seed"] + 1)  # the same directions for all networks of a seed
    directions = [filter_normalized(model, random_direction(model, generator=generator)) for _ in range(2)]
    options = {"num": task["points"], "radius": task["radius"], "probes": min(n, 10)}
    found = surface(model, cross_entropy, X[:n], y[:n], directions=directions, generator=generator, **options)
    return {
        **_small(found, float(found.values[task["points"] // 2, task["points"] // 2])),
        "coordinates": found.coordinates[0].tolist(),
        "counts": found.counts(),
        "reached": None if found.valid.all() else reached(model, directions, found, X[:n], y[:n]),
        "loss": losses,
        "test_accuracy": accuracy(model, X_test, y_test),
    }


def reached(
    model: nn.Module, directions: Sequence[Mapping[str, Tensor]], found: Surface, X: Tensor, y: Tensor
) -> dict[str, Any]:
    """The same surface with the loss at the state at which the solver stops, converged or not.

    So the thesis draws it: its solver returns the best state that it has seen, and nothing asks
    whether that is an equilibrium, or the only one.
    """
    parameters = dict(model.named_parameters())
    origin = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    values, valid = np.empty(found.values.shape), np.full(found.values.shape, CellStatus.VALID, dtype=np.int8)
    model.eval()
    with torch.no_grad():
        for i, a in enumerate(found.coordinates[0].tolist()):
            for j, b in enumerate(found.coordinates[1].tolist()):
                for name, parameter in parameters.items():
                    parameter.copy_(origin[name] + a * directions[0][name] + b * directions[1][name])
                values[i, j] = cross_entropy(model(X), y)
        for name, parameter in parameters.items():
            parameter.copy_(origin[name])
    middle = len(found.coordinates[0]) // 2
    return _small(dataclasses.replace(found, values=values, status=valid), float(values[middle, middle]))


def _small(found: Surface, centre: float) -> dict[str, Any]:
    """The values, and the area of small loss around the centre."""
    low = basin(found, level=centre + ABOVE) if math.isfinite(centre) else None
    return {
        "values": [[float(f"{v:.5g}") if math.isfinite(v) else None for v in row] for row in found.values.tolist()],
        "centre": None if low is None else centre,
        "area": None if low is None else low.area,
        "undecided": None if low is None else low.undecided,
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
            "as the thesis computes the loss, at the state at which the solver stops, converged or not: its area is greater "
            "than that of every number of repetitions, for every seed",
        ),
    )
    departures = (
        "The thesis trains on CIFAR-10 for 50 epochs and prints no channels; this is MNIST at 14 x 14, with --full 10,000 "
        "images of CIFAR-10 at 16 x 16, 12 channels and 10 epochs, the surface on 100 images. One recipe for all networks, "
        "without a penalty: cells take smaller steps than encoders and heads (key slow), because otherwise few points of the "
        "surface of the equilibrium network have an equilibrium. At a point without one the loss is that of the state at which "
        "the solver stops, as in the thesis; the area that is known without such points is printed beside it.",
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
        own = [_as_drawn(r)["area"] for r in sorted(results, key=lambda r: r.task["seed"]) if r.task["repeats"] == 0]
        if set(depths) & set(lost) or None in own:
            findings["equilibrium"] = not_tested("some network has no loss at the centre of its surface")
        else:
            most = [max(row) for row in zip(*(areas[depth] for depth in depths), strict=True)]
            text = "area " + ", ".join(texts[: len(depths)]) + f", equilibrium {spread(own)}"
            if 0 not in lost:
                undecided = values_of(results, "undecided", repeats=0)
                text += f"; known to have one equilibrium {spread(areas[0])}, undecided beside it {spread(undecided)}"
            larger = all(mine > other for mine, other in zip(own, most, strict=True))
            findings["equilibrium"] = decide(larger, text, **{**numbers, "equilibrium": own, "known": areas[0]})
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
        surfaces = {name: result.values for name, result in shown.items()}
        drawn = {
            f"{name}, where the solver stops": {**values, **values["reached"]}
            for name, values in surfaces.items()
            if values.get("reached")
        }
        return [*contours({**surfaces, **drawn}), through]


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


def _as_drawn(result: Result) -> Mapping[str, Any]:
    """What the thesis would have drawn; the same where every point has one known equilibrium."""
    found: Mapping[str, Any] = result.values.get("reached") or result.values
    return found


def _depths(results: Sequence[Result]) -> list[int]:
    """In the order of the report: the equilibrium last."""
    return sorted({r.task["repeats"] for r in results}, key=lambda depth: depth or math.inf)


def _title(depth: int) -> str:
    return f"repeat-{depth}" if depth else "equilibrium"
