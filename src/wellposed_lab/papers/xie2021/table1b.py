"""[xie2021, Table 1b]: a deep OptEq next to other implicit networks of the same size."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from wellposed.nn import MonotoneClassifier
from wellposed_lab.papers.claims import Claim, ClaimFinding, decide, not_tested, spread
from wellposed_lab.papers.datasets import channels_of, ten_classes
from wellposed_lab.papers.experiment import AbstractExperiment, Result, Task, values_of
from wellposed_lab.papers.xie2021.table1a import ENOUGH, KEYS, ConvConfig, conv_opteq, learned

__all__ = ["Table1b", "Table1bConfig"]

#: The accuracies of the table.
PRINTED = {"opteq": 0.857, "monotone": 0.741}
#: "the accuracies of the table" within this.
SAME = 0.01
ALPHA = 0.8


@dataclass(frozen=True, kw_only=True)
class Table1bConfig(ConvConfig):
    """Sizes of the deep OptEq; the other network has at most as many parameters."""

    epochs: int = 6


class Table1b(AbstractExperiment):
    """A deep OptEq with five layers, and a monotone network with one convolution."""

    name = "xie2021/table1b"
    title = "implicit networks with as many parameters"
    claims = (
        Claim(
            "monotone",
            "A deep OptEq is better than a monotone network with one convolution and as many parameters.",
            "[xie2021, Section 5.2]",
            "its test accuracy is higher for every seed",
        ),
        Claim(
            "values",
            "85.7% for the deep OptEq and 74.1% for the monotone network, on CIFAR-10.",
            "[xie2021, Table 1b]",
            f"the mean test accuracies of both within {SAME:.0%}; tested with at least {ENOUGH} test images of CIFAR-10",
        ),
        Claim(
            "ode",
            "A deep OptEq is better than a Neural ODE and an augmented one.",
            "[xie2021, Section 5.2]",
            "its test accuracy is higher for every seed",
        ),
        Claim(
            "averaging",
            "Sequential averaging with the operator S is better than without.",
            "[xie2021, Section 5.2]",
            "the test accuracy is higher for every seed",
        ),
    )
    departures = (
        "The paper trains on CIFAR-10 for 200 epochs, with a step that is halved every 30; here it falls along a cosine, and "
        "without --full the data are MNIST at 8 x 8. Gradients are exact, where the paper unrolls 20 steps.",
    )
    quick = Table1bConfig()
    full = Table1bConfig(
        data="cifar10",
        images=50000,
        test_images=10000,
        size=32,
        channels=(16, 32, 64, 64, 128),
        state_channels=32,
        epochs=200,
        batch=128,
    )

    def available(self, config: Table1bConfig) -> tuple[Table1bConfig, list[str]]:
        data, n, n_test, notes = ten_classes(config.data, config.images, config.test_images)
        return dataclasses.replace(config, data=data, images=n, test_images=n_test), notes

    def tasks(self, config: Table1bConfig) -> list[Task]:
        shared = config.part(*KEYS)
        return [{"network": network, "seed": seed, **shared} for network in PRINTED for seed in config.seeds]

    def run(self, task: Task) -> dict[str, Any]:
        channels = channels_of(task["data"])
        opteq = conv_opteq(channels, task, alpha=ALPHA)
        if task["network"] == "opteq":
            return learned(opteq, task)
        return learned(_monotone(channels, task, sum(parameter.numel() for parameter in opteq.parameters())), task)

    def judge(self, config: Table1bConfig, results: Sequence[Result]) -> Mapping[str, ClaimFinding]:
        scores = {network: values_of(results, "test_accuracy", network=network) for network in PRINTED}
        sizes = {network: values_of(results, "parameters", network=network)[0] for network in PRINTED}
        text = ", ".join(f"{network} ({sizes[network]} parameters): {spread(scores[network])}" for network in PRINTED)
        better = all(a > b for a, b in zip(scores["opteq"], scores["monotone"], strict=True))
        findings = {
            "monotone": decide(better, text, **scores),
            "ode": not_tested("this package has no Neural ODE"),
            "averaging": not_tested("training is by the exact gradient, without sequential averaging"),
        }
        if config.data == "cifar10" and config.test_images >= ENOUGH:
            means = {network: sum(found) / len(found) for network, found in scores.items()}
            same = all(abs(means[network] - printed) <= SAME for network, printed in PRINTED.items())
            findings["values"] = decide(same, text, **means)
        else:
            findings["values"] = not_tested(f"it needs CIFAR-10 and {ENOUGH} test images")
        return findings

    def panels(self, config: Table1bConfig, results: Sequence[Result]) -> list[dict[str, Any]]:
        x = list(range(1, config.epochs + 1))
        curves = [{"label": network, "x": x, "y": values_of(results, "loss", network=network)} for network in PRINTED]
        return [{"title": config.data, "x_label": "epoch", "y_label": "training loss", "y_scale": "log", "curves": curves}]


def _monotone(in_channels: int, task: Task, most: int) -> MonotoneClassifier:
    """The widest network with one convolution that has no more parameters than that."""

    def network_of(width: int) -> MonotoneClassifier:
        options: dict[str, Any] = {"margin": 0.5, "rtol": 1e-3, "on_failure": "ignore"}
        generator = torch.Generator().manual_seed(task["seed"])
        size = task["size"]
        grid = max(g for g in (1, 2, 4) if size % g == 0)  # 4 x 4 is that of the deep OptEq
        return MonotoneClassifier.conv((in_channels, size, size), width, 10, grid=grid, generator=generator, **options)

    def count(width: int) -> int:
        return sum(parameter.numel() for parameter in network_of(width).parameters())

    width = 1
    while count(2 * width) <= most:
        width *= 2
    step = width
    while step:  # count grows with the width: the last one that fits, by bisection
        if count(width + step) <= most:
            width += step
        step //= 2
    return network_of(width)
