"""[nguyen2022, Chapter 5]: which initializations satisfy the conditions on lambda_0."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from wellposed.certify import nguyen2022
from wellposed.nn import MonotoneDEQ
from wellposed_lab.papers.claims import Claim, ClaimFinding, decide
from wellposed_lab.papers.datasets import samples
from wellposed_lab.papers.experiment import AbstractExperiment, ExperimentConfig, Result, Task

__all__ = ["INITS", "Initial", "InitialConfig"]

#: Deviations of A and B, U and u, in units of 1/(2 sqrt(width)), sqrt(2/d) and 1/sqrt(width).
INITS: dict[str, tuple[float, float, float]] = {
    "default": (1.0, 1.0, 1.0),
    "A = B = 0": (0.0, 1.0, 1.0),
    "u = 0": (1.0, 1.0, 0.0),
    "A = B = u = 0": (0.0, 1.0, 0.0),
}


@dataclass(frozen=True, kw_only=True)
class InitialConfig(ExperimentConfig):
    """Sizes."""

    widths: tuple[int, ...] = (60, 240)  # of the network
    scales: tuple[float, ...] = (1.0, 100.0, 10000.0)  # of U
    n: int = 5  # samples, uniform on the unit sphere of R^(2n), labels standard normal
    margin: float = 0.9


class Initial(AbstractExperiment):
    """Both conditions, corrected, by certificate: inits, scales of U, widths."""

    name = "nguyen2022/initial"
    title = "initializations and the conditions on lambda_0"
    claims = (
        Claim(
            "default",
            "A Gaussian start satisfies Condition 1 (flow) if the network is wide.",
            "[nguyen2022, Theorem 3.3.1 and Chapter 5], read as a claim",
            "at the widest, unscaled, the certificate holds for every seed",
        ),
        Claim(
            "flow",
            "Some start satisfies Condition 1 (gradient flow).",
            "ours",
            "at least one row of the table is certified for every seed",
        ),
        Claim(
            "descent",
            "Some start satisfies Condition 2 (gradient descent).",
            "ours",
            "at least one row of the table is certified for every seed",
        ),
        Claim(
            "width",
            "Width helps: a row that is certified stays so when the width grows.",
            "ours",
            "no row is certified at a width and not at a greater one, with the same start and scale, for every seed",
        ),
    )
    departures = ("The conditions are those of the certificate: (3.8) to (3.18) with their errors corrected.",)
    quick = InitialConfig()
    full = InitialConfig(widths=(60, 240, 960), scales=(1.0, 100.0, 10000.0, 1e6), n=10)

    def tasks(self, config: InitialConfig) -> list[Task]:
        shared = config.part("n", "margin")
        return [
            {"init": init, "scale": scale, "width": width, "seed": seed, **shared}
            for seed in config.seeds
            for width in sorted(config.widths)
            for init in INITS
            for scale in sorted(config.scales)
        ]

    def run(self, task: Task) -> dict[str, Any]:
        d = 2 * task["n"]
        data = samples("sphere", d, 1, paper="ling2022", seed=task["seed"], dtype=torch.float64)
        X, y = data.X[: task["n"]] / math.sqrt(d), data.y[: task["n"]]
        generator = torch.Generator().manual_seed(task["seed"])
        model = MonotoneDEQ(d, task["width"], margin=task["margin"], generator=generator, dtype=torch.float64)
        inner, outer, read = INITS[task["init"]]
        with torch.no_grad():
            model.A.mul_(inner)
            model.B.mul_(inner)
            model.U.mul_(outer * task["scale"])
            model.u.mul_(read)
        Z = model.solve(X).value
        found: dict[str, Any] = {"lambda_0": float(torch.linalg.svdvals(Z)[-1])}
        for dynamics in ("flow", "descent"):
            certificate = nguyen2022(model, X, y, dynamics=dynamics)
            found[dynamics] = certificate.certified
            found[f"{dynamics}_failing"] = [h.name for h in certificate.hypotheses if h.holds is not True]
        return found

    def judge(self, config: InitialConfig, results: Sequence[Result]) -> Mapping[str, ClaimFinding]:
        widest, rows = max(config.widths), self._rows(results)
        default = rows["flow"]["default", 1.0, widest] if 1.0 in config.scales else 0.0
        lost = sum(
            rows["flow"][init, scale, a] > rows["flow"][init, scale, b]
            for init in INITS
            for scale in config.scales
            for a, b in zip(sorted(config.widths), sorted(config.widths)[1:], strict=False)
        )

        def some(dynamics: str) -> ClaimFinding:
            good = [f"{init}, U x {scale:g}, width {m}" for (init, scale, m), part in rows[dynamics].items() if part == 1]
            text = f"{len(good)} of {len(rows[dynamics])} rows" + (f": {'; '.join(good)}" if good else "")
            return decide(bool(good), text, rows=good)

        return {
            "default": decide(default == 1, f"certified for {default:.0%} of the seeds at width {widest}", part=default),
            "flow": some("flow"),
            "descent": some("descent"),
            "width": decide(lost == 0, f"{lost} rows lose their certificate with a greater width", lost=lost),
        }

    def remarks(self, results: Sequence[Result]) -> list[str]:
        names = sorted({name for r in results for name in r.values["descent_failing"]})
        counts = [f"'{name}' in {sum(name in r.values['descent_failing'] for r in results)}" for name in names]
        return [f"hypotheses of descent that fail, of {len(results)} runs: {', '.join(counts)}"] if names else []

    def panels(self, config: InitialConfig, results: Sequence[Result]) -> list[dict[str, Any]]:
        rows, widest = self._rows(results), max(config.widths)
        axes = {"kind": "bars", "x_label": "part of seeds that are certified", "y_label": ""}
        panels = []
        for dynamics in ("flow", "descent"):
            found = {f"{i}, U x {s:g}": [part] for (i, s, m), part in rows[dynamics].items() if m == widest}
            panels.append({"title": f"{dynamics}, width {widest}", **axes, "rows": found})
        return panels

    @staticmethod
    def _rows(results: Sequence[Result]) -> dict[str, dict[tuple[str, float, int], float]]:
        """By dynamics and (init, scale, width): the part of seeds that are certified."""
        keys = list(dict.fromkeys((r.task["init"], r.task["scale"], r.task["width"]) for r in results))
        found: dict[str, dict[tuple[str, float, int], float]] = {}
        for dynamics in ("flow", "descent"):
            by = {key: [r.values[dynamics] for r in results if _key(r) == key] for key in keys}
            found[dynamics] = {key: sum(values) / len(values) for key, values in by.items()}
        return found


def _key(result: Result) -> tuple[str, float, int]:
    return result.task["init"], result.task["scale"], result.task["width"]
