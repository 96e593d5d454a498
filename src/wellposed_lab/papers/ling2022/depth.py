"""[ling2022, Lemma 4, Theorems 4 and 5]: depth, and weights that are tied or drawn anew."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wellposed.kernel import population_gram_layers
from wellposed.nn import GaussianDEQ
from wellposed_lab.papers.claims import Claim, ClaimFinding, decide, not_tested, slope, spread
from wellposed_lab.papers.datasets import samples
from wellposed_lab.papers.experiment import AbstractExperiment, ExperimentConfig, Result, Task, values_of
from wellposed_lab.papers.ling2022.figure1 import WEIGHT_VARIANCE

__all__ = ["Depth", "DepthConfig", "fresh_randomness"]

#: 2 sqrt(2) sigma_w, the factor a layer of Theorems 4 and 5.
FACTOR = 2 * math.sqrt(2 * WEIGHT_VARIANCE)
#: The exponent of |G^(l)/m - K^(l)| in m that the proof gives, with room for few widths and seeds.
EXPONENT, ROOM = -0.5, 0.15
#: How far entries of variance 2 may be from it, in standard deviations of that mean.
DEVIATIONS = 5.0


@dataclass(frozen=True, kw_only=True)
class DepthConfig(ExperimentConfig):
    """Sizes."""

    widths: tuple[int, ...] = (100, 200, 400, 800)  # m
    n: int = 20  # samples, uniform on the sphere of R^n of radius sqrt(n)
    depth: int = 12  # the greatest l


class Depth(AbstractExperiment):
    """Gram matrices G^(l) of l layers, with one weight matrix or a new one in every layer."""

    name = "ling2022/depth"
    title = "depth, tied and untied weights"
    claims = (
        Claim(
            "theorem4",
            "|G - G^(l)|_F/m falls with the depth at least like (2 sqrt(2) sigma_w)^l.",
            "[ling2022, Theorem 4]",
            f"the factor a layer, fitted over all depths at the widest, is at most 2 sqrt(2) sigma_w = {FACTOR:.2g}, for every "
            "seed",
        ),
        Claim(
            "theorem5",
            "|G^(l)/m - K^(l)|_F <= n (2 sqrt(2) sigma_w)^l, with probability near 1 for wide networks.",
            "[ling2022, Theorem 5]",
            "at the widest it holds at every depth for every seed",
        ),
        Claim(
            "width",
            "At a fixed depth |G^(l)/m - K^(l)|_F falls like m^(-1/2), with tied weights as with untied ones.",
            "[ling2022, proof of Theorem 5]",
            f"both slopes of log mean distance against log m, at the greatest depth, are in [{EXPONENT - ROOM:g}, "
            f"{EXPONENT + ROOM:g}]",
        ),
        Claim(
            "lemma4",
            "G^(l+1)_ij = phi(M h)^T phi(M h') with independent entries of M from N(0, 2).",
            "[ling2022, Lemma 4]",
            "the relative error is below 1e-10, and the mean square of the entries is within "
            f"{DEVIATIONS:g} standard deviations of 2, in every run",
        ),
    )
    departures = (
        "Theorem 4 is an order: its constant is not looked at. In Lemma 4, M_3 and h'_3 have the part of q that is orthogonal "
        "to p. Computed in float64.",
    )
    varied = {"width": "widths"}
    quick = DepthConfig()
    full = DepthConfig(widths=(250, 500, 1000, 2000), n=100, depth=16)

    def run(self, task: Task) -> dict[str, Any]:
        n, m, depth = task["n"], task["width"], task["depth"]
        X = samples("sphere", n, 1, paper="ling2022", seed=task["seed"], dtype=torch.float64).X
        generator = torch.Generator().manual_seed(task["seed"])
        options: dict[str, Any] = {"generator": generator, "dtype": torch.float64, "rtol": 1e-12, "on_ill_posed": "ignore"}
        model = GaussianDEQ(n, m, weight_variance=WEIGHT_VARIANCE, **options)
        with torch.no_grad():
            W, C, Z = model.W.detach(), model.injection(X), model.solve(X).value
            tied, untied = [torch.relu(C)], [torch.relu(C)]
            for _ in range(depth - 1):
                fresh = torch.randn(m, m, generator=generator, dtype=torch.float64) * math.sqrt(2 * WEIGHT_VARIANCE / m)
                tied.append(torch.relu(tied[-1] @ W.t() + C))
                untied.append(torch.relu(untied[-1] @ fresh.t() + C))
            G = Z @ Z.t()
            K = population_gram_layers(X, WEIGHT_VARIANCE, depth)[1:]
            error, square = fresh_randomness(model, X, [z[:2] for z in tied[:4]])
        return {
            "to_limit": [float(torch.linalg.norm(G - z @ z.t())) / m for z in tied],
            "tied": [float(torch.linalg.norm(z @ z.t() / m - k)) for z, k in zip(tied, K, strict=True)],
            "untied": [float(torch.linalg.norm(z @ z.t() / m - k)) for z, k in zip(untied, K, strict=True)],
            "lemma4": error,
            "deviations": square,
        }

    def judge(self, config: DepthConfig, results: Sequence[Result]) -> Mapping[str, ClaimFinding]:
        widths, depths = sorted(set(config.widths)), list(range(1, config.depth + 1))
        widest = {key: values_of(results, key, width=widths[-1]) for key in ("to_limit", "tied")}
        factors = [_factor(depths, row) for row in widest["to_limit"]]
        holds = [_first(depths, row, config.n) for row in widest["tied"]]
        bound = [f"fails from depth {depth} on" if depth else "holds at every depth" for depth in holds]
        slopes = {}
        for key in ("tied", "untied"):
            means = [statistics.fmean(row[-1] for row in values_of(results, key, width=m)) for m in widths]
            slopes[key] = slope(widths, means) if len(widths) > 1 else math.nan
        text = ", ".join(f"slope {value:.3f} with {key} weights" for key, value in slopes.items())
        right = all(abs(value - EXPONENT) <= ROOM for value in slopes.values())
        errors, off = ([r.values[key] for r in results] for key in ("lemma4", "deviations"))
        return {
            "theorem4": decide(max(factors) <= FACTOR, f"factor a layer {spread(factors)}", factors=factors),
            "theorem5": decide(not any(holds), f"m={widths[-1]}: {', '.join(bound)} (one entry a seed)", fails=holds),
            "width": decide(right, text, **slopes) if len(widths) > 1 else not_tested("it needs at least two widths"),
            "lemma4": decide(
                max(errors) < 1e-10 and max(map(abs, off)) <= DEVIATIONS,
                f"relative error at most {max(errors):.2g}; mean square of M within {max(map(abs, off)):.2g} deviations of 2",
                error=max(errors),
                deviations=max(map(abs, off)),
            ),
        }

    def panels(self, config: DepthConfig, results: Sequence[Result]) -> list[dict[str, Any]]:
        widths, depths = sorted(set(config.widths)), list(range(1, config.depth + 1))
        log = {"x_label": "depth l", "y_scale": "log"}
        limit = [{"label": f"m = {m}", "x": depths, "y": values_of(results, "to_limit", width=m)} for m in widths]
        start = statistics.fmean(row[0] for row in values_of(results, "to_limit", width=widths[-1]))
        theory = {"x": depths, "style": "--"}
        limit.append({"label": "(2 sqrt(2) sigma_w)^l", **theory, "y": [[start * FACTOR ** (d - 1) for d in depths]]})
        bound = [{"label": f"m = {m}", "x": depths, "y": values_of(results, "tied", width=m)} for m in widths]
        bound.append({"label": "Theorem 5", **theory, "y": [[config.n * FACTOR**d for d in depths]]})
        last = {key: [[row[-1] for row in values_of(results, key, width=m)] for m in widths] for key in ("tied", "untied")}
        by_width = [{"label": key, "x": widths, "y": list(map(list, zip(*y, strict=True)))} for key, y in last.items()]
        return [
            {"title": "Theorem 4", "y_label": "|G - G^(l)|_F/m", **log, "curves": limit},
            {"title": "Theorem 5", "y_label": "|G^(l)/m - K^(l)|_F", **log, "curves": bound},
            {
                "title": f"depth {config.depth}",
                "y_label": "|G^(l)/m - K^(l)|_F",
                "x_label": "width m",
                "x_scale": "log",
                "y_scale": "log",
                "curves": by_width,
            },
        ]


def fresh_randomness(model: GaussianDEQ, X: Tensor, layers: Sequence[Tensor]) -> tuple[float, float]:
    """The construction of [ling2022, Lemma 4] for the first two samples and the last of some
    layers.

    Args:
        model: A network.
        X: Its inputs.
        layers: z^(1), ..., z^(l), (2, m) each.

    Returns:
        The relative error of phi(M h)^T phi(M h') against G_12^(l+1); how many standard deviations
        the mean square of M is from 2.
    """
    W, U, (zi, zj) = model.W.detach(), model.U.detach(), layers[-1]
    m, d = U.shape
    before = [z[i] for i in (0, 1) for z in layers[:-1]]
    V = torch.linalg.qr(torch.stack(before, dim=1))[0] if before else zi.new_zeros(m, 0)
    p, q = (z - V @ (V.t() @ z) for z in (zi, zj))
    across = q - p * (p @ q) / (p @ p)
    scale, one, x = math.sqrt(WEIGHT_VARIANCE / m), zi.new_ones(1), X / math.sqrt(d)
    directions = torch.cat([V, (p / p.norm())[:, None], (across / across.norm())[:, None]], dim=1)
    M = torch.cat([W @ directions / scale, math.sqrt(d) * U], dim=1)
    h = torch.cat([scale * (V.t() @ zi), scale * p.norm() * one, 0 * one, x[0]])
    other = torch.cat([scale * (V.t() @ zj), scale * (p @ q) / p.norm() * one, scale * across.norm() * one, x[1]])
    truth = float(torch.relu(W @ zi + U @ X[0]) @ torch.relu(W @ zj + U @ X[1]))
    square = float(M.square().mean() - 2) / (2 * math.sqrt(2 / M.numel()))  # squares of N(0, 2) have the variance 8
    return abs(float(torch.relu(M @ h) @ torch.relu(M @ other)) / truth - 1), square


def _factor(depths: Sequence[int], row: Sequence[float]) -> float:
    """By which the distance falls a layer, by least squares in its logarithm, above rounding."""
    known = [(depth, math.log(value)) for depth, value in zip(depths, row, strict=True) if value > 1e-10 * row[0]]
    if len(known) < 2:
        return math.nan
    return math.exp(statistics.linear_regression([d for d, _ in known], [v for _, v in known]).slope)


def _first(depths: Sequence[int], row: Sequence[float], n: int) -> int | None:
    """The first depth at which the bound of Theorem 5 fails; None if there is none."""
    return next((depth for depth, value in zip(depths, row, strict=True) if value > n * FACTOR**depth), None)
