"""[nguyen2022, Figure 4.5]: the loss around a multiscale equilibrium network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from wellposed.nn import MultiscaleDEQ
from wellposed.solve import Anderson
from wellposed_lab.papers.claims import Claim, ClaimFinding, decide, not_tested, spread
from wellposed_lab.papers.datasets import channels_of
from wellposed_lab.papers.experiment import Result, Task
from wellposed_lab.papers.nguyen2022.figure4_4 import (
    FULL,
    LANDSCAPE_RECIPE,
    AbstractLandscape,
    LandscapeConfig,
    contours,
    landscape,
)

__all__ = ["Figure45"]


class Figure45(AbstractLandscape):
    """How many minima the surface has."""

    name = "nguyen2022/figure4.5"
    title = "the loss around a multiscale equilibrium network"
    claims = (
        Claim(
            "one_minimum",
            "The loss landscape of an MDEQ has only one minimum and looks invex.",
            "[nguyen2022, Section 4.2.2 and Chapter 5]",
            "as the thesis computes the loss, at the state at which the solver stops, converged or not: on every surface "
            "exactly one point is lower than its (up to 8) neighbours",
        ),
        Claim(
            "imagenet",
            "So does that of the MDEQ that was trained on ImageNet.",
            "[nguyen2022, Figure 4.5]",
            "the same, for that network and 1024 images of ImageNet",
        ),
    )
    departures = (
        "The thesis looks at a network trained on ImageNet, and at 1024 of its images; this is a small one with two "
        "resolutions, trained here (with --full 10 epochs on 10,000 images of CIFAR-10 at 16 x 16, the surface on 100 of "
        "them). Its cell takes smaller steps than encoder and head (key slow), with a Jacobian penalty.",
        LANDSCAPE_RECIPE,
    )
    quick = LandscapeConfig(epochs=4, n=100, n_seen=40, points=7, radius=0.5)
    full = FULL

    def run(self, task: Task) -> dict[str, Any]:
        options: dict[str, Any] = {"solver": Anderson(), "rtol": 1e-3, "max_steps": 100, "on_failure": "ignore", "grid": 7}
        channels, generator = task["channels"], torch.Generator().manual_seed(task["seed"])
        model = MultiscaleDEQ.classifier(channels_of(task["data"]), (channels, channels), 10, generator=generator, **options)
        found = landscape(model, task, penalty=True)
        return {**found, "minima": minima((found["reached"] or found)["values"]), "certain": certain_minima(found["values"])}

    def judge(self, config: LandscapeConfig, results: Sequence[Result]) -> Mapping[str, ClaimFinding]:
        known = [r.values["counts"].get("VALID", 0) / config.points**2 for r in results]
        counts, certain = ([r.values[key] for r in results] for key in ("minima", "certain"))
        text = f"minima {spread(counts)}; part of the points with one known equilibrium {spread(known)}, minima among these "
        text += f"whose neighbours all have one too {spread(certain)}"
        return {
            "one_minimum": decide(set(counts) == {1}, text, minima=counts, known=known, certain=certain),
            "imagenet": not_tested("it needs the trained network of the thesis and ImageNet"),
        }

    def remarks(self, results: Sequence[Result]) -> list[str]:
        return [f"loss of the last epoch: {spread([r.values['loss'][-1] for r in results])}"]

    def panels(self, config: LandscapeConfig, results: Sequence[Result]) -> list[dict[str, Any]]:
        middle, x = config.points // 2, results[0].values["coordinates"]
        values = [r.values["values"] for r in results]
        curves = [
            {"label": "first direction", "x": x, "y": [[row[middle] for row in rows] for rows in values]},
            {"label": "second direction", "x": x, "y": [rows[middle] for rows in values]},
        ]
        through = {"title": "through the centre", "x_label": "along a direction", "y_label": "loss", "curves": curves}
        shown = contours({f"seed {r.task['seed']}": r.values for r in results[:2]})
        drawn = {
            f"seed {r.task['seed']}, where the solver stops": {**r.values, **r.values["reached"]}
            for r in results[:2]
            if r.values["reached"]
        }
        return [*shown, *contours(drawn), through]


def minima(values: Sequence[Sequence[float | None]]) -> int:
    """Points that are lower than all of their neighbours whose value is known."""
    return _count(values, np.inf)


def certain_minima(values: Sequence[Sequence[float | None]]) -> int:
    """Those of them whose neighbours are all known."""
    return _count(values, -np.inf)


def _count(values: Sequence[Sequence[float | None]], unknown: float) -> int:
    known = np.array([[np.nan if value is None else value for value in row] for row in values])
    grid = np.pad(np.where(np.isnan(known), unknown, known), 1, constant_values=np.inf)
    height, width = known.shape
    around = [grid[1 + i : 1 + i + height, 1 + j : 1 + j + width] for i in (-1, 0, 1) for j in (-1, 0, 1) if i or j]
    return int((np.isfinite(known) & np.all([known < other for other in around], axis=0)).sum())
