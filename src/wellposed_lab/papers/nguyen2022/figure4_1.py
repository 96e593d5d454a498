"""[nguyen2022, Figure 4.1]: initialization and the convergence of iterates."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv2d, group_norm, relu

from wellposed.data import load
from wellposed.solve import Anderson, fixed_point
from wellposed_lab.papers.claims import Claim, ClaimFinding, decide, spread
from wellposed_lab.papers.datasets import two_classes
from wellposed_lab.papers.experiment import AbstractExperiment, ExperimentConfig, Result, Task, values_of

__all__ = ["Figure41", "Figure41Config"]

#: Standard deviations of N(0, 1), and of N(0, 0.01) in its two readings.
LARGE, VARIANCE, DEVIATION = DEVIATIONS = (1.0, 0.1, 0.01)
#: Their names in figures.
NAMES = {LARGE: "N(0, 1)", VARIANCE: "N(0, 0.01), a variance", DEVIATION: "N(0, 0.01), a deviation"}
#: "stay quite steady after the first step": the relative residual after this many evaluations is below that.
AFTER, STEADY = 5, 0.05
#: "more chaos": residuals are greater by this factor.
APART = 10.0
_CLAIMS = (
    (
        "steady",
        "With entries from N(0, 0.01) the iterates stay quite steady after the first step.",
        f"the mean relative residual after {AFTER} evaluations is below {STEADY:g} for every seed",
    ),
    (
        "chaos",
        "With entries from N(0, 1) the iterates are more chaotic.",
        f"the mean relative residual at the end is at least {APART:g} times that of N(0, 0.01), for every seed",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Figure41Config(ExperimentConfig):
    """Sizes."""

    data: str = "mnist"  # whose test images
    n: int = 16  # images
    channels: int = 8  # channels, groups: of the state, and of its norms
    groups: int = 4
    steps: int = 40  # evaluations of the map


class Figure41(AbstractExperiment):
    """Eq. (4.1), f(z, x) = norm(relu(z + norm(x + W_2 * norm(relu(W_1 * z))))), by Anderson."""

    name = "nguyen2022/figure4.1"
    title = "initialization and the convergence of iterates"
    claims = tuple(
        Claim(key + suffix, text, f"[nguyen2022, Section 4.1.1], 0.01 read as {reading}", rule)
        for key, text, rule in _CLAIMS
        for suffix, reading in (("", "variance"), ("_deviation", "standard deviation"))
    )
    departures = (
        "The thesis does not print channels, groups or kernel sizes: 3 x 3 kernels, no biases; x is a convolution of the image "
        "normalised like the state. The norms make the scale of W_1 irrelevant: only that of W_2 against x matters.",
    )
    quick = Figure41Config()
    full = Figure41Config(n=100, channels=48, groups=8, steps=100, seeds=(0, 1, 2, 3, 4))

    def available(self, config: Figure41Config) -> tuple[Figure41Config, list[str]]:
        (data,), _, n, notes = two_classes((config.data,), 2, config.n, paper="gao2022")
        return dataclasses.replace(config, data=data, n=n), notes

    def tasks(self, config: Figure41Config) -> list[Task]:
        shared = super().tasks(config)
        return [{"deviation": deviation, **task} for deviation in DEVIATIONS for task in shared]

    def run(self, task: Task) -> dict[str, Any]:
        images = load(task["data"], 2, (0, 1), seed=task["seed"], n_test=task["n"], flatten=False, size=28, grey=True).X_test
        assert images is not None
        generator = torch.Generator().manual_seed(task["seed"])
        channels = task["channels"]

        def norm(z: Tensor) -> Tensor:
            return group_norm(z, task["groups"])

        U = torch.randn(channels, 1, 3, 3, generator=generator)
        W1, W2 = (torch.randn(channels, channels, 3, 3, generator=generator) * task["deviation"] for _ in range(2))
        x = norm(conv2d(images, U, padding=1))

        def f(z: Tensor) -> Tensor:
            inner = norm(relu(conv2d(z, W1, padding=1)))
            return norm(relu(z + norm(x + conv2d(inner, W2, padding=1))))

        options: dict[str, Any] = {"max_steps": task["steps"], "rtol": 1e-6, "on_failure": "ignore", "record": True}
        solution = fixed_point(f, torch.zeros_like(x), solver=Anderson(), **options)
        assert solution.history is not None
        # a sample that has converged is measured no more: it keeps its last residual
        residuals = _filled(solution.history)
        return {"residuals": residuals.mean(dim=1).tolist(), "converged": int(solution.converged.sum())}

    def judge(self, config: Figure41Config, results: Sequence[Result]) -> Mapping[str, ClaimFinding]:
        residuals = {deviation: values_of(results, "residuals", deviation=deviation) for deviation in DEVIATIONS}
        early = {key: [values[min(AFTER, len(values)) - 1] for values in rows] for key, rows in residuals.items()}
        ends = {key: [values[-1] for values in rows] for key, rows in residuals.items()}
        return {
            "steady": _steady(early[VARIANCE]),
            "steady_deviation": _steady(early[DEVIATION]),
            "chaos": _apart(ends[LARGE], ends[VARIANCE]),
            "chaos_deviation": _apart(ends[LARGE], ends[DEVIATION]),
        }

    def panels(self, config: Figure41Config, results: Sequence[Result]) -> list[dict[str, Any]]:
        curves = []
        for deviation in DEVIATIONS:
            rows = values_of(results, "residuals", deviation=deviation)
            length = max(map(len, rows))
            y = [[*row, *[row[-1]] * (length - len(row))] for row in rows]
            curves.append({"label": NAMES[deviation], "x": list(range(1, length + 1)), "y": y})
        labels = {"x_label": "evaluation", "y_label": "relative residual", "y_scale": "log"}
        return [{"title": config.data, **labels, "curves": curves}]


def _steady(early: list[float]) -> ClaimFinding:
    return decide(max(early) < STEADY, f"residual after {AFTER} evaluations: {spread(early)}", early=early)


def _apart(large: list[float], small: list[float]) -> ClaimFinding:
    factors = [a / b for a, b in zip(large, small, strict=True)]
    text = f"residual at the end {spread(large)} against {spread(small)}, factor {spread(factors)}"
    return decide(min(factors) >= APART, text, factors=factors)


def _filled(history: Tensor) -> Tensor:
    """(steps, batch) with the last known residual in the place of NaN."""
    filled = history.clone()
    for before, row in zip(filled, filled[1:], strict=False):
        row[row.isnan()] = before[row.isnan()]
    return filled[~filled.isnan().any(dim=1)]
