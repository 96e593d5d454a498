"""Full-batch training at several widths, for [ling2022], [gao2022] and [gao2023]."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from wellposed.nn import AbstractContraction
from wellposed_lab.papers.datasets import samples, two_classes
from wellposed_lab.papers.experiment import AbstractExperiment, ExperimentConfig, Result, Task
from wellposed_lab.papers.width_results import WidthResults
from wellposed_lab.papers.width_training import train

__all__ = ["AbstractWidthStudy", "WidthConfig", "shared_step", "with_own_step"]


@dataclass(frozen=True, kw_only=True)
class WidthConfig(ExperimentConfig):
    """Sizes of a study of widths."""

    data: tuple[str, ...] = ("mnist",)  # names of data sets
    widths: tuple[int, ...] = (50, 150, 450)  # m
    once_from: int = 2000  # networks of this width and wider: on one data set, mnist if it is there, for the first seed
    n: int = 100  # n, n_test: samples to train and to test; a data set with fewer gives what it has
    n_test: int = 200
    steps: int = 300  # of descent
    points: int = 30  # about how often to look at test loss and norm
    step: float = 1.0  # the step size in units of 1/lambda_max of the tangent kernel of the reference network at its start
    reference: int = 1  # its width; that of the widest network if that is wider

    @property
    def common(self) -> int:
        """The width of the network whose step size all take."""
        return max(self.reference, *self.widths)

    @property
    def main(self) -> str:
        """The data set of the widest networks and of the controls."""
        return "mnist" if "mnist" in self.data else self.data[0]


class AbstractWidthStudy(AbstractExperiment):
    """Trains the network of a paper at several widths.

    Attributes:
        paper: Whose preprocessing.
    """

    paper: ClassVar[str]
    quick: ClassVar[WidthConfig]
    full: ClassVar[WidthConfig]

    @abc.abstractmethod
    def network(self, features: int, width: int, generator: torch.Generator) -> AbstractContraction:
        """The network at its start, with policies "ignore": failures are measured."""

    def available(self, config: WidthConfig) -> tuple[WidthConfig, list[str]]:
        data, n, n_test, notes = two_classes(config.data, config.n, config.n_test, paper=self.paper)
        return dataclasses.replace(config, data=data, n=n, n_test=n_test), notes

    def tasks(self, config: WidthConfig) -> list[Task]:
        """By seed, then by width: a run that is interrupted has one seed of everything first."""
        shared = {key: getattr(config, key) for key in ("n", "n_test", "steps", "points", "step")}
        return [
            {"data": data, "seed": seed, "width": width, "reference": config.common, **shared}
            for seed in config.seeds
            for width in sorted(config.widths)
            for data in config.data
            if width < config.once_from or (seed == config.seeds[0] and data == config.main)
        ]

    def run(self, task: Task) -> dict[str, Any]:
        data = samples(task["data"], task["n"], task["n_test"], paper=self.paper, seed=task["seed"])

        def make(width: int) -> AbstractContraction:
            return self.network(data.X.shape[1], width, torch.Generator().manual_seed(task["seed"]))

        options = {key: task[key] for key in ("width", "reference", "step", "steps", "points")}
        return train(make, data, **options, centred=task.get("centred", False))

    def remarks(self, results: Sequence[Result]) -> list[str]:
        unsolved = sum(result.values["unsolved"] for result in results)
        if not unsolved:
            return []
        runs = sum(result.values["unsolved"] > 0 for result in results)
        return [
            f"{unsolved} equilibria or adjoints in {runs} of {len(results)} runs did not converge; their numbers are not exact"
        ]

    def panels(self, config: WidthConfig, results: Sequence[Result]) -> list[dict[str, Any]]:
        of = WidthResults(results)
        rows = [(data, column) for data in of.data for column in ("loss", "test_loss", "norm")]
        return [_panel(of, data, column) for data, column in rows]


_LABELS = {"loss": "training loss / n", "test_loss": "test loss / n", "norm": "contraction factor"}


def _panel(of: WidthResults, data: str, column: str) -> dict[str, Any]:
    curves = []
    for m in of.widths_of(data):
        runs = of.of(data, m)
        x = max((values["step"] for values in runs), key=len)
        y = [[*values[column], *[None] * (len(x) - len(values[column]))] for values in runs]
        curves.append({"label": f"m = {m}", "x": x, "y": y})
    scale = "linear" if column == "norm" else "log"
    return {"title": data, "x_label": "step", "y_label": _LABELS[column], "y_scale": scale, "curves": curves}


def shared_step(config: WidthConfig, results: Sequence[Result]) -> list[Result]:
    """The runs with the step size that all widths share, without a control."""
    return [r for r in results if r.task["reference"] == config.common and not r.task.get("centred")]


def with_own_step(tasks: Sequence[Task]) -> list[Task]:
    """The same tasks with the step size of each width, where it is another one."""
    return [{**task, "reference": task["width"]} for task in tasks if task["width"] != task["reference"]]
