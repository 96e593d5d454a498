"""[gao2022, Figure 1]: training loss, test loss and operator norm at several widths."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import torch

from wellposed.nn import SkipDEQ
from wellposed_lab.papers.claims import Claim, ClaimFinding, decide, not_tested
from wellposed_lab.papers.experiment import Result
from wellposed_lab.papers.widths import FALLS, AbstractWidthStudy, Values, WidthConfig, WidthResults, speed

__all__ = ["Gao2022Figure1"]

#: The norms in the third column of the figure start near 0.199 = 2 gamma.
GAMMA = 0.1
#: "approximately equal to its initialization": the axes of the paper's figure span less than this.
SAME_NORM = 0.02
_SECTION = "[gao2022, Section 4]"


class Gao2022Figure1(AbstractWidthStudy):
    """SkipDEQ on MNIST, Fashion-MNIST, CIFAR-10 and SVHN."""

    name = "gao2022/figure1"
    title = "width, convergence, test loss and norm with a feature path"
    paper = "gao2022"
    claims = (
        Claim(
            "faster", "A larger width gives better convergence rates.", _SECTION, f"mean log10(loss) over the steps: {FALLS}"
        ),
        Claim("test", "A larger width achieves lower test loss.", _SECTION, f"test loss at the end: {FALLS}"),
        Claim(
            "no_bell",
            "The bell curve of bias and variance does not appear.",
            _SECTION,
            "the widest network has the least mean test loss at the end",
        ),
        Claim(
            "norm_start",
            "Operator norms (gamma/sqrt m)|A(k)| stay approximately equal to the start.",
            _SECTION,
            f"the relative change is below {SAME_NORM:.0%} at every look of every run",
        ),
        Claim(
            "norm_wider",
            "Operator norms are slightly larger for larger width.",
            _SECTION,
            "the norm at the end rises: its mean from each width to the next, and for every seed from narrowest to widest",
        ),
        Claim(
            "well_posed",
            "The equilibrium stays well-posed: (gamma/sqrt m)|A(k)| < 1.",
            "[gao2022, Lemma 3.5]",
            "an upper bound at every step of every run is below 1",
        ),
    )
    departures = (
        "The paper does not print its step size and gamma: the step is 1/lambda_max(H) of the widest network at its start, the "
        "same for all widths; gamma = 0.1 is read from the figure, whose norms start near 0.199 = 2 gamma.",
    )
    quick = WidthConfig(data=("mnist",), widths=(50, 150, 450), n=100, n_test=200, steps=200, points=20)
    full = WidthConfig(
        data=("mnist", "fashion_mnist", "cifar10", "svhn"),
        widths=(500, 1000, 2000, 4000),
        n=1000,
        n_test=1000,
        steps=1000,
        points=20,
    )

    def network(self, features: int, width: int, generator: torch.Generator) -> SkipDEQ:
        return SkipDEQ(features, width, gamma=GAMMA, generator=generator, on_ill_posed="ignore", on_failure="ignore")

    def judge(self, config: WidthConfig, results: Sequence[Result]) -> Mapping[str, ClaimFinding]:
        of = WidthResults(results)
        return {
            "faster": of.falls(speed),
            "test": of.falls(last_test_loss),
            "no_bell": least_at_widest(of),
            "norm_start": of.everywhere(_norm_change, SAME_NORM),
            "norm_wider": of.falls(lambda values: float(values["norm"][-1]), ".5g", rises=True),
            "well_posed": of.contracts(),
        }


def last_test_loss(values: Values) -> float:
    """At the end."""
    return float(values["test_loss"][-1])


def least_at_widest(of: WidthResults) -> ClaimFinding:
    """Whether the mean test loss at the end is least for the widest network, on every data set."""
    if len(of.widths) < 3:
        return not_tested("a bell needs at least three widths")
    best = {}
    for data in of.data:
        means = {m: statistics.fmean(last_test_loss(values) for values in of.of(data, m)) for m in of.widths}
        best[data] = min(means, key=means.__getitem__)
    text = ", ".join(f"{data}: least at m={m}" for data, m in best.items())
    return decide(all(m == of.widths[-1] for m in best.values()), text, **best)


def _norm_change(values: Values) -> float:
    first = values["norm"][0]
    return max(abs(norm - first) for norm in values["norm"]) / first
