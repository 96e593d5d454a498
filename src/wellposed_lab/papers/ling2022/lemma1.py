"""[ling2022, Lemma 1]: the norm of a Gaussian W."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from wellposed_lab.papers.claims import Claim, ClaimFinding, decide, spread
from wellposed_lab.papers.experiment import AbstractExperiment, ExperimentConfig, Result, Task, values_of
from wellposed_lab.papers.ling2022.figure1 import WEIGHT_VARIANCE

__all__ = ["Lemma1", "Lemma1Config"]

BOUND = 2 * math.sqrt(2 * WEIGHT_VARIANCE)
#: exp(-c m) has no printed c; at hundreds of units it should be far below this.
RARE = 0.01


@dataclass(frozen=True, kw_only=True)
class Lemma1Config(ExperimentConfig):
    """Sizes."""

    widths: tuple[int, ...] = (50, 100, 200, 400)  # m
    draws: int = 40  # matrices for each width and seed


class Lemma1(AbstractExperiment):
    """How often a random W exceeds the norm that the lemma promises."""

    name = "ling2022/lemma1"
    title = "the norm of a Gaussian recurrent matrix"
    claims = (
        Claim(
            "bound",
            "|W| <= 2 sqrt(2) sigma_w with probability 1 - exp(-Omega(m)).",
            "[ling2022, Lemma 1]",
            f"at most {RARE:.0%} of all draws at the greatest width exceed the bound",
        ),
        Claim(
            "contraction",
            "A random W is a contraction, |W| < 1, for sigma_w^2 < 1/8.",
            "[ling2022, Lemma 1]",
            "all draws at the greatest width",
        ),
    )
    departures = (f"sigma_w^2 = {WEIGHT_VARIANCE:g}, as in the paper's experiments; the bound is then {BOUND:.3f}.",)
    varied = {"width": "widths"}
    quick = Lemma1Config()
    full = Lemma1Config(widths=(100, 200, 400, 800), draws=200)

    def run(self, task: Task) -> dict[str, Any]:
        m, generator = task["width"], torch.Generator().manual_seed(task["seed"])
        scale = math.sqrt(2 * WEIGHT_VARIANCE / m)
        draws = (torch.randn(m, m, generator=generator, dtype=torch.float64) * scale for _ in range(task["draws"]))
        return {"norms": [float(torch.linalg.matrix_norm(W, ord=2)) for W in draws]}

    def judge(self, config: Lemma1Config, results: Sequence[Result]) -> Mapping[str, ClaimFinding]:
        widest = max(config.widths)
        norms = {m: values_of(results, "norms", width=m) for m in sorted(config.widths)}
        exceeding = {m: [_exceeding(values) for values in rows] for m, rows in norms.items()}
        text = ", ".join(f"m={m}: {spread(parts)}" for m, parts in exceeding.items())
        mean = sum(exceeding[widest]) / len(exceeding[widest])
        greatest = [max(values) for values in norms[widest]]
        return {
            "bound": decide(
                mean <= RARE, f"part of the draws above the bound: {text}", **{str(m): v for m, v in exceeding.items()}
            ),
            "contraction": decide(max(greatest) < 1, f"greatest |W| at m={widest}: {spread(greatest)}", greatest=greatest),
        }

    def panels(self, config: Lemma1Config, results: Sequence[Result]) -> list[dict[str, Any]]:
        widths = sorted(set(config.widths))
        parts = {(r.task["width"], r.task["seed"]): _exceeding(r.values["norms"]) for r in results}
        y = [[parts[m, seed] for m in widths] for seed in sorted(set(config.seeds))]
        curve = {"label": "measured", "x": widths, "y": y}
        labels = {"x_label": "width m", "y_label": "part of the draws above the bound", "x_scale": "log"}
        return [{"title": "Lemma 1", **labels, "curves": [curve], "lines": [{"y": RARE, "label": "what decides"}]}]


def _exceeding(norms: Sequence[float]) -> float:
    return sum(norm > BOUND for norm in norms) / len(norms)
