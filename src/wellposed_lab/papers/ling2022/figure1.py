"""[ling2022, Figure 1] and its second experiment: width and convergence, and the norm of W."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from wellposed.nn import GaussianDEQ
from wellposed_lab.papers.claims import Claim, ClaimFinding
from wellposed_lab.papers.experiment import Result, Task
from wellposed_lab.papers.width_results import FALLS, WidthResults, speed
from wellposed_lab.papers.widths import AbstractWidthStudy, WidthConfig, shared_step, with_own_step

__all__ = ["Ling2022Figure1"]

#: sigma_w^2 of the paper's experiments.
WEIGHT_VARIANCE = 0.08
_SECTION = "[ling2022, Section 5]"


class Ling2022Figure1(AbstractWidthStudy):
    """GaussianDEQ on synthetic data, MNIST and CIFAR-10.

    Every run is made twice: with one step size for all widths, as in the paper, and with the step
    1/lambda_max(H) of each. H grows like m, so with one step wider networks are faster for this
    reason alone; the second run asks for more.
    """

    name = "ling2022/figure1"
    title = "wider equilibrium networks converge faster"
    paper = "ling2022"
    claims = (
        Claim(
            "faster", "Convergence becomes faster as the width grows.", _SECTION, f"mean log10(loss) over the steps: {FALLS}"
        ),
        Claim(
            "final", "The final training loss becomes smaller as the width grows.", _SECTION, f"log10 of the last loss: {FALLS}"
        ),
        Claim(
            "norm",
            "|W(t)| < 1 throughout the training.",
            _SECTION,
            "an upper bound of |W| at every step of every run is below 1",
        ),
        Claim("stable", "Gram matrices are more stable for wider networks.", _SECTION, f"|G(end) - G(0)|/|G(0)|: {FALLS}"),
        Claim(
            "own_step",
            "Wider is faster also when each width takes its own step 1/|H|.",
            "ours",
            f"mean log10(loss) over the steps, every width with its own step: {FALLS}",
        ),
    )
    departures = (
        "The paper does not print its step size, widths and number of steps; the step is 1/lambda_max(H) of the widest network "
        "at its start, the same for all widths (with --full that of 2000 units, on all data sets).",
        "Computed in float32; equilibria and adjoints are solved to a relative residual of 1e-6.",
    )
    quick = WidthConfig(data=("sphere", "mnist"), widths=(50, 150, 450), n=100, n_test=100, steps=200, points=20)
    full = WidthConfig(
        data=("sphere", "mnist", "cifar10"),
        widths=(500, 1000, 2000),
        reference=2000,
        n=1000,
        n_test=1000,
        steps=1000,
        points=20,
        seeds=(0, 1, 2),
    )

    def network(self, features: int, width: int, generator: torch.Generator) -> GaussianDEQ:
        policies: dict[str, Any] = {"on_ill_posed": "ignore", "on_failure": "ignore"}
        return GaussianDEQ(features, width, weight_variance=WEIGHT_VARIANCE, generator=generator, **policies)

    def tasks(self, config: WidthConfig) -> list[Task]:
        shared = super().tasks(config)
        own = with_own_step(shared)
        return [task for seed in config.seeds for part in (shared, own) for task in part if task["seed"] == seed]

    def judge(self, config: WidthConfig, results: Sequence[Result]) -> Mapping[str, ClaimFinding]:
        shared, own = WidthResults(shared_step(config, results)), WidthResults(own_step(results))
        return {
            "faster": shared.falls(speed),
            "final": shared.falls(final),
            "norm": WidthResults(results).contracts(),
            "stable": shared.falls(lambda values: float(values["gram_change"])),
            "own_step": own.falls(speed),
        }

    def panels(self, config: WidthConfig, results: Sequence[Result]) -> list[dict[str, Any]]:
        of_own = [panel for panel in super().panels(config, own_step(results)) if panel["y_label"].startswith("training")]
        own = [{**panel, "title": f"{panel['title']}, own steps"} for panel in of_own]
        shared = [
            panel for panel in super().panels(config, shared_step(config, results)) if not panel["y_label"].startswith("test")
        ]
        triples = zip(shared[::2], own, shared[1::2], strict=True)
        lines = [{"y": 1.0, "label": "limit"}]
        return [panel for loss, loss_own, norm in triples for panel in (loss, loss_own, {**norm, "lines": lines})]


def final(values: Mapping[str, Any]) -> float:
    """log10 of the last loss."""
    return float(torch.tensor(values["loss"][-1]).clamp(min=1e-300).log10())


def own_step(results: Sequence[Result]) -> list[Result]:
    """The runs in which a network takes its own step size."""
    return [result for result in results if result.task["reference"] == result.task["width"]]
