"""[nguyen2022, Figure 4.2]: the way of the iterates in a plane, for two initializations."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from wellposed.landscape import project, trajectory
from wellposed.nn import ResidualDEQ
from wellposed.solve import Anderson
from wellposed_lab.papers.claims import Claim, ClaimFinding, decide, spread
from wellposed_lab.papers.datasets import images, ten_classes
from wellposed_lab.papers.experiment import AbstractExperiment, Result, Task
from wellposed_lab.papers.nguyen2022.figure4_1 import DEVIATIONS, NAMES, Figure41Config

__all__ = ["Figure42", "residual", "wander"]

#: "steady after the first step": what follows is shorter than the first step.
STEADY = 1.0
#: "more chaos": what follows is longer by this factor.
APART = 2.0
#: Images whose ways are drawn.
SHOWN = 20


class Figure42(AbstractExperiment):
    """The states of Anderson's solver, in their first two principal components."""

    name = "nguyen2022/figure4.2"
    title = "initialization and the way of the iterates"
    claims = (
        Claim(
            "steady",
            "In the plane the iterates of N(0, 0.01) stay quite steady after the first step.",
            "[nguyen2022, Section 4.1.1], 0.01 read as variance",
            f"the way after the first step is shorter than {STEADY:g} first steps on average, for every seed",
        ),
        Claim(
            "steady_deviation",
            "In the plane the iterates of N(0, 0.01) stay quite steady after the first step.",
            "[nguyen2022, Section 4.1.1], 0.01 read as standard deviation",
            f"the way after the first step is shorter than {STEADY:g} first steps on average, for every seed",
        ),
        Claim(
            "chaos",
            "In the plane the iterates of N(0, 1) are more chaotic.",
            "[nguyen2022, Section 4.1.1]",
            f"in first steps their way is at least {APART:g} times that of both readings of N(0, 0.01), for every seed",
        ),
    )
    departures = (
        "The thesis does not print channels, groups or kernel sizes; images are 14 x 14, the encoder is a 3 x 3 "
        "convolution and a group norm, and the plane is that of all three initializations together.",
    )
    quick = Figure41Config(n=30, channels=8, steps=50)
    full = Figure41Config(n=100, channels=48, steps=100, seeds=(0, 1, 2, 3, 4))

    def available(self, config: Figure41Config) -> tuple[Figure41Config, list[str]]:
        data, _, n, notes = ten_classes(config.data, 30, config.n)
        return dataclasses.replace(config, data=data, n=n), notes

    def run(self, task: Task) -> dict[str, Any]:
        _, (X, y) = images(task["data"], 30, task["n"], size=14, seed=task["seed"])
        solver_kwargs = {"groups": task["groups"], "max_steps": task["steps"]}
        models = [
            residual(X.shape[1], task["channels"], task["seed"], init_std=deviation, **solver_kwargs)
            for deviation in DEVIATIONS
        ]
        ways = [trajectory(model, X) for model in models]
        plane = project(ways)
        return {
            "wander": {f"{d:g}": wander(points) for d, points in zip(DEVIATIONS, plane.points, strict=True)},
            "wander_everywhere": {f"{d:g}": wander(way.states) for d, way in zip(DEVIATIONS, ways, strict=True)},
            "converged": {f"{d:g}": int(way.converged.sum()) for d, way in zip(DEVIATIONS, ways, strict=True)},
            "explained": float(plane.explained.sum()),
            "classes": y[:SHOWN].tolist(),
            "ways": {
                f"{d:g}": [
                    part[: int(count)].round(4).tolist()
                    for part, count in zip(points.transpose(1, 0, 2), way.num_steps, strict=True)
                ][:SHOWN]
                for d, points, way in zip(DEVIATIONS, plane.points, ways, strict=True)
            },
        }

    def judge(self, config: Figure41Config, results: Sequence[Result]) -> Mapping[str, ClaimFinding]:
        large, variance, deviation = ([r.values["wander"][f"{d:g}"] for r in results] for d in DEVIATIONS)
        factors = [a / max(b, c) for a, b, c in zip(large, variance, deviation, strict=True)]
        text = f"{spread(large)} first steps, against {spread(variance)} and {spread(deviation)}; factor {spread(factors)}"
        return {
            "steady": decide(max(variance) < STEADY, f"{spread(variance)} first steps", wander=variance),
            "steady_deviation": decide(max(deviation) < STEADY, f"{spread(deviation)} first steps", wander=deviation),
            "chaos": decide(min(factors) >= APART, text, factors=factors),
        }

    def panels(self, config: Figure41Config, results: Sequence[Result]) -> list[dict[str, Any]]:
        labels = {"kind": "ways", "x_label": "first component", "y_label": "second component"}
        shown = results[0].values
        return [{"title": NAMES[d], **labels, "ways": shown["ways"][f"{d:g}"], "classes": shown["classes"]} for d in DEVIATIONS]


def residual(in_channels: int, channels: int, seed: int, **options: Any) -> ResidualDEQ:
    """With Anderson's solver, tolerance 1e-3 and 100 evaluations, as in [nguyen2022, Fig. 4.3]; the
    head averages over 7 x 7 regions, because one average of few channels learns little.

    Args:
        in_channels, channels: Of images and of the state.
        seed: Of the parameters.
        options: As in `ResidualDEQ`.
    """
    chosen: dict[str, Any] = {"solver": Anderson(), "rtol": 1e-3, "max_steps": 100, "on_failure": "ignore", "grid": 7}
    chosen["input_gain"] = 1.0  # of the paper, not the default
    return ResidualDEQ(in_channels, channels, 10, generator=torch.Generator().manual_seed(seed), **{**chosen, **options})


def wander(points: np.ndarray) -> float:
    """The way after the first step in units of the first step, on average: 0 for a single leap.

    Args:
        points: (steps, batch, features), NaN after a sample's last one.
    """
    ways = np.linalg.norm(np.diff(points, axis=0), axis=2)
    return float(np.mean(np.nansum(ways[1:], axis=0) / ways[0]))
