"""[xie2021, Table 1b]: a deep OptEq next to other implicit networks of the same size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wellposed_lab.papers.claims import Claim, ClaimFinding, decide, not_tested, spread
from wellposed_lab.papers.experiment import Result
from wellposed_lab.papers.xie2021.classification import DEPARTURES, FULL, AbstractTable, ConvConfig, Row, opteq_row

__all__ = ["Table1b", "Table1bConfig"]

#: The accuracies of the table.
PRINTED = {
    "deep OptEq": 0.857,
    "deep OptEq with S": 0.860,
    "monotone": 0.741,
    "Neural ODE": 0.537,
    "augmented Neural ODE": 0.606,
}
#: "the accuracies of the table" within this.
SAME = 0.01
#: Test images from which on a difference of one percent is more than chance: its standard error is then 0.5%.
ENOUGH = 10000
ALPHA = 0.8


@dataclass(frozen=True, kw_only=True)
class Table1bConfig(ConvConfig):
    """Sizes of the deep OptEq; the other networks have at most as many parameters."""

    epochs: int = 6


class Table1b(AbstractTable):
    """A deep OptEq with five layers, a monotone network with one convolution, and Neural ODEs."""

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
        *DEPARTURES,
        "With S: 20 unrolled steps of averaging with R = |z|^2/2 and the step sizes of Theorem 4, of which the table prints "
        "nothing. Neural ODEs take 4 steps of the classical method of Runge and Kutta, where the paper does not name a solver.",
    )
    quick = Table1bConfig()
    full = Table1bConfig(**{**FULL, "feature_channels": 25}, channels=(16, 32, 64, 64, 128))

    def rows(self, config: Table1bConfig) -> dict[str, Row]:
        return {
            "deep OptEq": opteq_row(ALPHA),
            "monotone": {"network": "monotone"},
            "Neural ODE": {"network": "ode"},
            "augmented Neural ODE": {"network": "augmented ode"},
            "deep OptEq with S": opteq_row(ALPHA, "l2", 0.5, network="averaged"),
        }

    def judge(self, config: Table1bConfig, results: Sequence[Result]) -> Mapping[str, ClaimFinding]:
        scores, sizes = self.scores(config, results), self.named(config, results, "parameters")

        def better(one: str, *others: str) -> ClaimFinding:
            text = ", ".join(f"{name} ({sizes[name][0]} parameters): {spread(scores[name])}" for name in (one, *others))
            holds = all(a > b for other in others for a, b in zip(scores[one], scores[other], strict=True))
            return decide(holds, text, **{name: scores[name] for name in (one, *others)})

        findings = {
            "monotone": better("deep OptEq", "monotone"),
            "ode": better("deep OptEq", "Neural ODE", "augmented Neural ODE"),
            "averaging": better("deep OptEq with S", "deep OptEq"),
            "values": not_tested(f"it needs 200 epochs of CIFAR-10 at 32 x 32, on a GPU, and {ENOUGH} test images"),
        }
        if config.data == "cifar10" and config.test_images >= ENOUGH:
            means = {name: sum(scores[name]) / len(scores[name]) for name in ("deep OptEq", "monotone")}
            text = ", ".join(f"{name}: {spread(scores[name])}" for name in means)
            findings["values"] = decide(all(abs(mean - PRINTED[name]) <= SAME for name, mean in means.items()), text, **means)
        return findings

    def panels(self, config: Table1bConfig, results: Sequence[Result]) -> list[dict[str, Any]]:
        x, losses = list(range(1, config.epochs + 1)), self.named(config, results, "loss")
        curves = [{"label": name, "x": x, "y": rows} for name, rows in losses.items()]
        printed = PRINTED if config.data == "cifar10" else {}
        axes = {"kind": "bars", "x_label": "test accuracy", "y_label": ""}
        bars = {"title": config.data, **axes, "rows": self.scores(config, results), "printed": printed}
        training = {"title": "training", "x_label": "epoch", "y_label": "training loss", "y_scale": "log", "curves": curves}
        return [bars, training]
