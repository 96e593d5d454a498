"""[gao2022, Figure 1]: training loss, test loss and operator norm at several widths."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from wellposed.nn import SkipDEQ
from wellposed_lab.papers.claims import Claim, ClaimFinding, decide, not_tested
from wellposed_lab.papers.experiment import Result, Task
from wellposed_lab.papers.width_results import FALLS, Values, WidthResults, speed
from wellposed_lab.papers.widths import AbstractWidthStudy, WidthConfig, shared_step, with_own_step

__all__ = ["Gao2022Figure1"]

#: The norms in the third column of the figure start near 0.199 = 2 gamma.
GAMMA = 0.1
#: "approximately equal to its initialization": the axes of the paper's figure span less than this.
SAME_NORM = 0.02
#: Two norms of five digits, as records keep them, may each be off by half a unit of the last.
ROUNDED = 1e-4
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
        Claim(
            "own_step",
            "Wider is faster when each width takes its own step 1/|H|.",
            "ours",
            f"mean log10(loss) over the steps, every width with its own step: {FALLS}",
        ),
        Claim(
            "centred",
            "Wider is faster when the random function of the start is subtracted from the output.",
            "ours",
            f"mean log10(loss) over the steps, with f(x; t) - f(x; 0) as output: {FALLS}",
        ),
        Claim(
            "centred_test",
            "A larger width achieves lower test loss when the random function of the start is subtracted from the output.",
            "ours",
            f"test loss at the end, with f(x; t) - f(x; 0) as output: {FALLS}",
        ),
    )
    departures = (
        "The paper does not print its step size and gamma: the step is 1/lambda_max(H) of the widest network at its start, the "
        "same for all widths (with --full that of 2000 units); gamma = 0.1 is read from the figure, whose norms start near "
        "0.199 = 2 gamma.",
        "Computed in float32; equilibria and adjoints are solved to a relative residual of 1e-6.",
    )
    quick = WidthConfig(data=("mnist",), widths=(50, 150, 450), n=100, n_test=200, steps=200, points=20)
    full = WidthConfig(
        data=("mnist", "fashion_mnist", "cifar10", "svhn"),
        widths=(500, 1000, 2000),
        reference=2000,
        n=1000,
        n_test=1000,
        steps=1000,
        points=20,
    )

    def network(self, features: int, width: int, generator: torch.Generator) -> SkipDEQ:
        return SkipDEQ(features, width, gamma=GAMMA, generator=generator, on_ill_posed="ignore", on_failure="ignore")

    def tasks(self, config: WidthConfig) -> list[Task]:
        """With two controls: the own step of each width on one data set, and the centred output."""
        shared = super().tasks(config)
        chosen = [task for task in shared if task["data"] == config.main]
        controls = [*with_own_step(chosen), *({**task, "centred": True} for task in shared)]
        return [task for seed in config.seeds for part in (shared, controls) for task in part if task["seed"] == seed]

    def judge(self, config: WidthConfig, results: Sequence[Result]) -> Mapping[str, ClaimFinding]:
        of = WidthResults(shared_step(config, results))
        own = [r for r in results if r.task["reference"] == r.task["width"] and not r.task.get("centred")]
        centred = [r for r in results if r.task.get("centred")]
        return {
            "faster": of.falls(speed),
            "test": of.falls(last_test_loss),
            "no_bell": least_at_widest(of),
            "norm_start": of.everywhere(_norm_change, SAME_NORM),
            "norm_wider": of.falls(lambda values: float(values["norm"][-1]), ".5g", rises=True),
            "well_posed": WidthResults(results).contracts(),
            "own_step": WidthResults([r for r in own if r.task["data"] == config.main]).falls(speed),
            "centred": WidthResults(centred).falls(speed),
            "centred_test": WidthResults(centred).falls(last_test_loss),
        }

    def panels(self, config: WidthConfig, results: Sequence[Result]) -> list[dict[str, Any]]:
        chosen = [r for r in results if r.task.get("centred") and r.task["data"] == config.main]
        centred = super().panels(config, chosen)
        controls = [{**panel, "title": f"{panel['title']}, start subtracted"} for panel in centred]
        return [*super().panels(config, shared_step(config, results)), *controls]


def last_test_loss(values: Values) -> float:
    """At the end."""
    return float(values["test_loss"][-1])


def least_at_widest(of: WidthResults) -> ClaimFinding:
    """Whether the mean test loss at the end is least for the widest network, on every data set."""
    if len(of.widths) < 3:
        return not_tested("a bell needs at least three widths")
    best = {}
    for data in of.data:
        found = {m: of.by_seed(data, m) for m in of.widths_of(data)}
        common = set.intersection(*(set(by) for by in found.values()))  # the widest may have been trained once
        means = {m: statistics.fmean(last_test_loss(by[seed]) for seed in sorted(common)) for m, by in found.items()}
        best[data] = min(means, key=means.__getitem__)
    text = ", ".join(f"{data}: least at m={m} of {len(of.widths_of(data))} widths" for data, m in best.items())
    return decide(all(m == of.widths_of(data)[-1] for data, m in best.items()), text, **best)


def _norm_change(values: Values) -> float:
    """At most this, also where the norms are those of a record."""
    first = values["norm"][0]
    return float(max(abs(norm - first) for norm in values["norm"]) / first + ROUNDED)
