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
from wellposed_lab.papers.datasets import images, ten_classes
from wellposed_lab.papers.experiment import AbstractExperiment, ExperimentConfig, Result, Task
from wellposed_lab.papers.image_training import accuracy, fit
from wellposed_lab.papers.nguyen2022.figure4_2 import STEADY, residual, wander

__all__ = ["Figure43", "Figure43Config"]


@dataclass(frozen=True, kw_only=True)
class Figure43Config(ExperimentConfig):
    """Sizes."""

    data: str = "mnist"  # name of a data set
    n: int = 200  # images to train
    n_test: int = 100  # images to test
    shown: int = 100  # how many of the images to train are followed
    size: int = 14  # of the images
    channels: int = 8  # of the state
    epochs: int = 4  # epochs, batch, lr: of Adam, its step falling along a cosine
    batch: int = 25
    lr: float = 5e-3
    rtols: tuple[float, ...] = (1e-2, 1e-3)  # of the solver: in the text of the thesis, and under its figure


#: The most evaluations that the thesis prints with a tolerance.
MAX_STEPS = {1e-2: 50, 1e-3: 100}
#: Images of each class whose ways are drawn, and how many epochs are.
DRAWN, STAGES = 2, 4


class Figure43(AbstractExperiment):
    """The states of Anderson's solver, at the start and after every epoch, in one plane."""

    name = "nguyen2022/figure4.3"
    title = "the way of the iterates during training"
    claims = (
        Claim(
            "leap",
            "At initialization the trajectory takes a single leap and quickly becomes steady.",
            "[nguyen2022, Section 4.1.2]",
            f"the way after the first step is shorter than {STEADY:g} first steps on average, for every seed and tolerance",
        ),
        Claim(
            "classes",
            "After the first epoch the states of different classes are in different regions.",
            "[nguyen2022, Section 4.1.2]",
            "after the first epoch more than half of the last states, and more than at the start, are nearest in the plane to "
            "the mean of their class, for every seed and tolerance",
        ),
        Claim(
            "complex",
            "The dynamic becomes more complex during training.",
            "[nguyen2022, Section 4.1.2]",
            "in first steps the way is longer after the last epoch than after the first one, and there than at the start, for "
            "every seed and tolerance",
        ),
        Claim(
            "deeper",
            "The network becomes deeper during training: the solver needs more evaluations.",
            "[nguyen2022, Section 4.1.2], after [bai2021]",
            "the mean number of evaluations is greater after the last epoch than at the start, for every seed and tolerance",
        ),
    )
    departures = (
        "The thesis trains 40 epochs with step 0.001 on all of MNIST and does not print channels, groups or kernel sizes; here "
        "10 epochs on 20,000 images with 16 channels (--full), 3 x 3 kernels, and a head that averages over 7 x 7 regions.",
        "Adam with a step that falls along a cosine to 0; the norm of the gradient is cut at 1; batches of 100 (--full).",
        "The text has the tolerance 1e-2 and 50 evaluations, the caption of the figure 1e-3 and 100: both are trained.",
    )
    varied = {"rtol": "rtols"}
    quick = Figure43Config()
    full = Figure43Config(n=20000, n_test=2000, shown=100, size=28, channels=16, epochs=10, batch=100, lr=1e-3)

    def available(self, config: Figure43Config) -> tuple[Figure43Config, list[str]]:
        data, n, n_test, notes = ten_classes(config.data, config.n, config.n_test)
        return dataclasses.replace(config, data=data, n=n, n_test=n_test), notes

    def run(self, task: Task) -> dict[str, Any]:
        (X, y), (X_test, y_test) = images(task["data"], task["n"], task["n_test"], size=task["size"], seed=task["seed"])
        rtol = task["rtol"]
        options = {"rtol": rtol, "max_steps": MAX_STEPS.get(rtol, 100)}
        model = residual(X.shape[1], task["channels"], task["seed"], **options)
        X_shown, y_shown = X[: task["shown"]], y[: task["shown"]]
        ways = [trajectory(model, X_shown)]
        sizes = {key: task[key] for key in ("epochs", "batch", "lr")}
        generator = torch.Generator().manual_seed(task["seed"])
        losses = fit(model, X, y, **sizes, generator=generator, each=lambda _: ways.append(trajectory(model, X_shown)))
        plane = project(ways)
        classes = y_shown.numpy()
        drawn = np.concatenate([np.flatnonzero(classes == c)[:DRAWN] for c in range(10)])
        stages = sorted({round(part * task["epochs"] / (STAGES - 1)) for part in range(STAGES)} | {1})
        return {
            "wander": [wander(points) for points in plane.points],
            "nearest": [
                _nearest(_last(points, way.num_steps), classes) for points, way in zip(plane.points, ways, strict=True)
            ],
            "steps": [float(way.num_steps.mean()) for way in ways],
            "unsolved": [int((~way.converged).sum()) for way in ways],
            "loss": losses,
            "test_accuracy": accuracy(model, X_test, y_test),
            "explained": plane.explained.tolist(),
            "classes": classes[drawn].tolist(),
            "ways": {
                str(epoch): [plane.points[epoch][: int(ways[epoch].num_steps[i]), i].round(4).tolist() for i in drawn]
                for epoch in stages
            },
        }

    def judge(self, config: Figure43Config, results: Sequence[Result]) -> Mapping[str, ClaimFinding]:
        starts, firsts, ends = ([r.values["wander"][i] for r in results] for i in (0, 1, -1))
        before, after = ([r.values["nearest"][i] for r in results] for i in (0, 1))
        few, many = ([r.values["steps"][i] for r in results] for i in (0, -1))
        rises = all(a < b < c for a, b, c in zip(starts, firsts, ends, strict=True))
        ways = self._text(results, "{} first steps at the start, {} after one epoch, {} at the end", starts, firsts, ends)
        return {
            "leap": decide(max(starts) < STEADY, self._text(results, "{} first steps", starts), wander=starts),
            "classes": decide(
                all(max(a, 0.5) < b for a, b in zip(before, after, strict=True)),
                self._text(results, "{} at the start, {} after one epoch", before, after),
                before=before,
                after=after,
            ),
            "complex": decide(rises, ways, start=starts, first=firsts, end=ends),
            "deeper": decide(
                all(a < b for a, b in zip(few, many, strict=True)),
                self._text(results, "{} evaluations at the start, {} at the end", few, many),
                start=few,
                end=many,
            ),
        }

    @staticmethod
    def _text(results: Sequence[Result], form: str, *columns: Sequence[float]) -> str:
        """The spread over seeds of each column, for one tolerance after the other."""
        parts = []
        for rtol in sorted({r.task["rtol"] for r in results}, reverse=True):
            rows = [i for i, r in enumerate(results) if r.task["rtol"] == rtol]
            parts.append(f"tolerance {rtol:g}: " + form.format(*(spread([column[i] for i in rows]) for column in columns)))
        return "; ".join(parts)

    def remarks(self, results: Sequence[Result]) -> list[str]:
        losses, scores = [r.values["loss"][-1] for r in results], [r.values["test_accuracy"] for r in results]
        learned = self._text(results, "training loss {} at the end, {} of test images right", losses, scores)
        unsolved = sum(sum(r.values["unsolved"]) for r in results)
        return [learned, *([f"{unsolved} of the ways that were followed did not converge"] if unsolved else [])]

    def panels(self, config: Figure43Config, results: Sequence[Result]) -> list[dict[str, Any]]:
        panels = []
        first = min(r.task["seed"] for r in results)
        for rtol in sorted(config.rtols, reverse=True):
            (shown,) = (r.values for r in results if r.task["rtol"] == rtol and r.task["seed"] == first)
            parts = [f"component {i + 1} ({part:.0%})" for i, part in enumerate(shown["explained"][:2])]
            axes = {"kind": "ways", "x_label": parts[0], "y_label": parts[1], "classes": shown["classes"]}
            for epoch, ways in shown["ways"].items():
                when = "start" if epoch == "0" else f"epoch {epoch}"
                panels.append({"title": f"{when}, tolerance {rtol:g}", **axes, "ways": ways})
        titles = {
            "wander": "way after the first step / first step",
            "nearest": "part nearest to own class",
            "steps": "evaluations",
        }
        epochs = list(range(config.epochs + 1))
        for key, label in titles.items():
            curves = [
                {"label": f"tolerance {rtol:g}", "x": epochs, "y": [r.values[key] for r in results if r.task["rtol"] == rtol]}
                for rtol in config.rtols
            ]
            panels.append({"title": key, "x_label": "epoch", "y_label": label, "curves": curves})
        return panels


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
