"""[ling2022, Theorems 1 and 2]: the Gram matrix of a wide network, and condition (9)."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from wellposed.certify import ling2022 as certificate
from wellposed.kernel import population_gram
from wellposed.nn import GaussianDEQ
from wellposed_lab.papers.claims import Claim, ClaimFinding, decide, not_tested, slope, spread
from wellposed_lab.papers.datasets import samples
from wellposed_lab.papers.experiment import AbstractExperiment, ExperimentConfig, Result, Task, values_of
from wellposed_lab.papers.ling2022.figure1 import WEIGHT_VARIANCE

__all__ = ["Theorem2", "Theorem2Config"]

#: The exponent -1/2, with room for few widths and seeds.
EXPONENT, ROOM = -0.5, 0.15


@dataclass(frozen=True, kw_only=True)
class Theorem2Config(ExperimentConfig):
    """Sizes."""

    widths: tuple[int, ...] = (100, 200, 400, 800)  # m
    n: int = 20  # samples, uniform on the sphere of R^n of radius sqrt(n)


class Theorem2(AbstractExperiment):
    """The features of random equilibrium networks of growing width."""

    name = "ling2022/theorem2"
    title = "the Gram matrix of a random equilibrium network"
    claims = (
        Claim(
            "rate",
            "|G/m - K|_F falls like m^(-1/2).",
            "[ling2022, Theorem 2]",
            f"the slope of log mean |G/m - K|_F against log m is in [{EXPONENT - ROOM:g}, {EXPONENT + ROOM:g}]",
        ),
        Claim(
            "least",
            "lambda_min(G) >= m lambda_min(K)/2 for wide networks.",
            "[ling2022, Theorem 2]",
            "it holds at the widest for every seed",
        ),
        Claim(
            "condition",
            "The condition of the convergence theorem is satisfied by wide Gaussian networks.",
            "[ling2022, Section 4]",
            "it is certified at the widest for every seed",
        ),
    )
    departures = (
        "The theorem leaves its constants open: the exponent of the width and the least eigenvalue are looked at. Samples are "
        "uniform on the sphere, as many as they have features; sigma_w^2 = 0.08 as in the paper's experiments. Computed in "
        "float64.",
    )
    varied = {"width": "widths"}
    quick = Theorem2Config()
    full = Theorem2Config(widths=(250, 500, 1000, 2000, 4000), n=200, seeds=(0, 1, 2, 3, 4))

    def run(self, task: Task) -> dict[str, Any]:
        data = samples("sphere", task["n"], 1, paper="ling2022", seed=task["seed"], dtype=torch.float64)
        generator = torch.Generator().manual_seed(task["seed"])
        options: dict[str, Any] = {"generator": generator, "dtype": torch.float64, "rtol": 1e-12, "on_ill_posed": "ignore"}
        model = GaussianDEQ(task["n"], task["width"], weight_variance=WEIGHT_VARIANCE, **options)
        Z = model.solve(data.X).value
        G, K = Z @ Z.t() / task["width"], population_gram(data.X, WEIGHT_VARIANCE)
        cert = certificate(model, data.X, data.y)
        return {
            "error": float(torch.linalg.norm(G - K)),
            "least": float(torch.linalg.eigvalsh(G)[0]),
            "least_limit": float(torch.linalg.eigvalsh(K)[0]),
            "verdict": cert.verdict.name,
            "readout": cert.measured.get("|a|"),
            "readout_allowed": cert.measured.get("|a| that (9) allows at most"),
        }

    def judge(self, config: Theorem2Config, results: Sequence[Result]) -> Mapping[str, ClaimFinding]:
        widths = sorted(set(config.widths))
        errors = {m: values_of(results, "error", width=m) for m in widths}
        widest = [result.values for result in results if result.task["width"] == widths[-1]]
        parts = [values["least"] / values["least_limit"] for values in widest]
        certified = sum(values["verdict"] == "CERTIFIED" for values in widest)
        norms = [
            f"|a| = {v['readout']:.3g}, allowed {v['readout_allowed']:.2g}" for v in widest if v["readout_allowed"] is not None
        ]
        verdicts = ", ".join(sorted({values["verdict"] for values in widest}))
        return {
            "rate": _rate(errors),
            "least": decide(
                min(parts) >= 0.5, f"lambda_min(G/m)/lambda_min(K) at m={widths[-1]}: {spread(parts)}", parts=parts
            ),
            "condition": decide(
                certified == len(widest),
                f"{certified} of {len(widest)} certified at m={widths[-1]} ({verdicts}); (9) bounds the read-out: "
                + "; ".join(norms),
                certified=certified,
            ),
        }

    def panels(self, config: Theorem2Config, results: Sequence[Result]) -> list[dict[str, Any]]:
        widths = sorted(set(config.widths))
        seeds = sorted(set(config.seeds))

        def rows(key: str, scale: str = "") -> list[list[float]]:
            by = {(r.task["width"], r.task["seed"]): r.values[key] / (r.values[scale] if scale else 1.0) for r in results}
            return [[by[m, seed] for m in widths] for seed in seeds]

        errors = rows("error")
        start = statistics.fmean(row[0] for row in errors)
        half = [start * (m / widths[0]) ** EXPONENT for m in widths]
        log = {"x_label": "width m", "x_scale": "log"}
        measured = {"label": "measured", "x": widths}
        distances = [{**measured, "y": errors}, {"label": "m^(-1/2)", "x": widths, "y": [half], "style": "--"}]
        left = {"title": "distance to the limit", "y_label": "|G/m - K|_F", "y_scale": "log", "curves": distances}
        right: dict[str, Any] = {"title": "least eigenvalue", "y_label": "lambda_min(G/m)/lambda_min(K)"}
        right |= {"curves": [{**measured, "y": rows("least", "least_limit")}], "lines": [{"y": 0.5, "label": "Theorem 2"}]}
        return [{**log, **left}, {**log, **right}]


def _rate(errors: Mapping[int, list[float]]) -> ClaimFinding:
    if len(errors) < 2:
        return not_tested("it needs at least two widths")
    exponent = slope(list(errors), [statistics.fmean(values) for values in errors.values()])
    text = ", ".join(f"m={m}: {spread(values)}" for m, values in errors.items())
    return decide(abs(exponent - EXPONENT) <= ROOM, f"slope {exponent:.3f} ({text})", slope=exponent)
