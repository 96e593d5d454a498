"""[xie2021, Theorems 1 to 3]: what equilibria minimise, and the limit of small steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from wellposed.convex import DeepOptEq, OptEq, inclusion_residual, objective, wide_limit
from wellposed_lab.papers.claims import Claim, ClaimFinding, decide, slope, spread
from wellposed_lab.papers.experiment import AbstractExperiment, ExperimentConfig, Result, Task

__all__ = ["Theorems", "TheoremsConfig"]

#: Values and residuals in float64 are equal up to this part.
ROUNDING = 1e-9
#: Sizes of perturbations, relative to the equilibrium.
SIZES = (1e-3, 1e-2, 1e-1, 1.0)
#: "of order alpha": the exponent 1, with room.
ROOM = 0.2


@dataclass(frozen=True, kw_only=True)
class TheoremsConfig(ExperimentConfig):
    """Sizes."""

    width: int = 12  # width, features, n: of the networks and their inputs
    features: int = 6
    n: int = 10
    directions: int = 200  # perturbations of each equilibrium, each in several sizes
    alphas: tuple[float, ...] = (0.1, 0.03, 0.01)  # for the limit


class Theorems(AbstractExperiment):
    """Random OptEq networks with one, two and three layers."""

    name = "xie2021/theorems"
    title = "equilibria as minimisers"
    claims = (
        Claim(
            "one",
            "The equilibrium of one layer minimises its convex objective.",
            "[xie2021, Theorem 1]",
            "no perturbed state has a smaller value, and some have a finite one, in every run",
        ),
        Claim(
            "two",
            "The states of two layers minimise the objective of both.",
            "[xie2021, Corollary 1]",
            "no perturbed state has a smaller value, and some have a finite one, in every run",
        ),
        Claim(
            "three",
            "The equilibrium of three layers solves the monotone inclusion.",
            "[xie2021, Theorem 2]",
            f"the residual of the inclusion is below {ROUNDING:g} in every run",
        ),
        Claim(
            "limit",
            "For alpha -> 0 deep networks tend to one wide layer, with an error of order alpha.",
            "[xie2021, Theorem 3]",
            f"the slope of log error against log alpha is within {ROOM:g} of 1 for every seed",
        ),
    )
    departures = (
        "The paper proves these statements and prints no experiment: sizes, random networks with kernels of norm 0.8 and "
        "alpha = 0.5 for two and three layers are ours. That no state is better is tested at random states, half of them on "
        "the way to an image of the layer, because the objective is infinite elsewhere if alpha = 1. Computed in float64.",
    )
    quick = TheoremsConfig()
    full = TheoremsConfig(width=60, features=30, n=50, directions=500, alphas=(0.1, 0.03, 0.01, 0.003), seeds=(0, 1, 2, 3, 4))

    def run(self, task: Task) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(task["seed"])
        d, m = task["features"], task["width"]
        factory_kwargs: dict[str, Any] = {
            "generator": generator,
            "dtype": torch.float64,
            "rtol": 1e-13,
            "max_steps": 20000,
            "norm_bound": 0.8,
        }
        X = torch.randn(task["n"], d, generator=generator, dtype=torch.float64)
        least = {}
        for name, model in {
            "one": OptEq(d, m, **factory_kwargs),
            "two": DeepOptEq(d, (m, m), alpha=0.5, **factory_kwargs),
        }.items():
            least[name] = _least_rise(model, X, task["directions"], generator)
        three = DeepOptEq(d, (m, m, m), alpha=0.5, **factory_kwargs)
        residual = float(inclusion_residual(three, X).abs().max())
        seed = int(torch.randint(2**31, (1,), generator=generator))
        errors = []
        for alpha in task["alphas"]:
            factory_kwargs["generator"] = torch.Generator().manual_seed(seed)
            model = DeepOptEq(d, (m, m, m), alpha=alpha, **factory_kwargs)
            Z, limit = model.solve(X).value, wide_limit(model).solve(X).value
            errors.append(float(torch.linalg.norm(Z - limit) / torch.linalg.norm(limit)))
        return {"least_rise": least, "residual": residual, "errors": errors}

    def judge(self, config: TheoremsConfig, results: Sequence[Result]) -> Mapping[str, ClaimFinding]:
        residuals = [result.values["residual"] for result in results]
        slopes = [slope(config.alphas, result.values["errors"]) for result in results]
        findings = {}
        for key in ("one", "two"):
            rises = [result.values["least_rise"][key] for result in results]
            text = f"least relative rise of the value {spread(rises)}, {config.directions * len(SIZES)} perturbations a sample"
            findings[key] = decide(all(-ROUNDING <= rise < math.inf for rise in rises), text, rises=rises)
        findings["three"] = decide(max(residuals) < ROUNDING, f"residual {spread(residuals)}", residuals=residuals)
        findings["limit"] = decide(all(abs(s - 1) <= ROOM for s in slopes), f"slope {spread(slopes)}", slopes=slopes)
        return findings

    def panels(self, config: TheoremsConfig, results: Sequence[Result]) -> list[dict[str, Any]]:
        alphas, errors = list(config.alphas), [result.values["errors"] for result in results]
        measured = {"label": "measured", "x": alphas, "y": errors}
        start = statistics.fmean(row[0] for row in errors)
        order = {"label": "order alpha", "x": alphas, "y": [[start * a / alphas[0] for a in alphas]], "style": "--"}
        labels = {"x_label": "alpha", "y_label": "relative distance to the wide layer", "x_scale": "log", "y_scale": "log"}
        return [{"title": "Theorem 3", **labels, "curves": [measured, order]}]


def _least_rise(model: Any, X: torch.Tensor, directions: int, generator: torch.Generator) -> float:
    """The least of (value at a perturbed state - value at the equilibrium)/(1 + |value|): negative
    if some state is better, infinite if all perturbed states are outside the domain.

    One perturbation is random, the next one leads to images of random states under the layers: with
    alpha = 1 the objective is finite at images, and between two of them, and hardly anywhere else.
    """
    phi = objective(model, X)
    states = phi.states(model.solve(X).value)
    value = phi(*states)
    sizes = torch.tensor(SIZES, dtype=X.dtype)
    least = math.inf
    for number in range(directions):
        random = [torch.randn(z.shape, generator=generator, dtype=z.dtype) for z in states]
        ways = [d * (z.norm(dim=1) / d.norm(dim=1)).unsqueeze(1) for z, d in zip(states, random, strict=True)]
        if number % 2:
            ways = [block.prox(z + d) - z for block, z, d in zip(phi.blocks, states, ways, strict=True)]
        rise = (phi.along(states, ways, sizes) - value.unsqueeze(1)) / (1 + value.abs()).unsqueeze(1)
        least = min(least, float(rise.min()))
    return least
