"""[nguyen2022, Sections 2.3.2 and 3.1]: iterations for monotone equilibria."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wellposed.nn import MonotoneDEQ
from wellposed.solve import PeacemanRachford
from wellposed_lab.papers.claims import Claim, ClaimFinding, decide, spread
from wellposed_lab.papers.experiment import AbstractExperiment, ExperimentConfig, Result, Task

__all__ = ["Splitting", "SplittingConfig"]

#: Steps of forward-backward, in units of m/L^2; the open interval ends at 2.
FORWARD = (0.5, 1.0, 1.9)
#: Steps of Peaceman-Rachford.
REFLECTED = (0.1, 1.0, 10.0)
#: Relative distance to the equilibrium that counts as found, and below which ratios are rounding.
FOUND, ROUNDING = 1e-6, 1e-9
#: Ratios may exceed their bound by this, which is rounding.
SLACK = 1e-6


@dataclass(frozen=True, kw_only=True)
class SplittingConfig(ExperimentConfig):
    """Sizes."""

    width: int = 40  # width, features, n: of the network and its inputs
    features: int = 20
    n: int = 10
    margin: float = 0.2  # m
    skews: tuple[float, ...] = (0.5, 4.0)  # B is multiplied by these: |W| grows, the margin stays
    steps: int = 2000  # of every iteration at most


class Splitting(AbstractExperiment):
    """Forward-backward, Peaceman-Rachford and the plain iteration on random monotone networks."""

    name = "nguyen2022/splitting"
    title = "iterations for monotone equilibria"
    claims = (
        Claim(
            "forward_backward",
            "Forward-backward contracts by sqrt(1 - 2am + a^2 L^2) for a in (0, 2m/L^2).",
            "[nguyen2022, Section 2.3.2]",
            f"at a = {', '.join(f'{a:g}' for a in FORWARD)} times m/L^2 no step has a greater factor",
        ),
        Claim(
            "peaceman_rachford",
            "Peaceman-Rachford converges for every a > 0.",
            "[nguyen2022, Section 2.3.2]",
            f"at a = {', '.join(f'{a:g}' for a in REFLECTED)} it comes within {FOUND:g} of the equilibrium, in every run",
        ),
        Claim(
            "plain",
            "z <- relu(W z + U x) gives the output of the network.",
            "[nguyen2022, eq. (3.1)]",
            f"it comes within {FOUND:g} of the equilibrium, in every run",
        ),
    )
    departures = (
        "The thesis leaves the initialization open; A and B are Gaussian with entries of variance 1/(4 width), B scaled.",
    )
    varied = {"skew": "skews"}
    quick = SplittingConfig()
    full = SplittingConfig(width=200, features=100, n=50, seeds=(0, 1, 2, 3, 4), skews=(0.5, 1.0, 2.0, 4.0), steps=20000)

    def run(self, task: Task) -> dict[str, Any]:
        model, X = network(task)
        with torch.no_grad():
            W, C = model.recurrent(), model.injection(X)
        Z = dense_equilibrium(W, C)
        F = torch.eye(len(W), dtype=W.dtype) - W
        L = float(torch.linalg.matrix_norm(F, ord=2))
        m, steps = task["margin"], task["steps"]
        forward = {}
        for part in FORWARD:
            a = part * m / L**2
            distances = _distances(lambda z, a=a: torch.relu(z - a * (z @ F.t() - C)), Z, steps)
            forward[f"{part:g}"] = {
                "bound": math.sqrt(1 - 2 * a * m + (a * L) ** 2),
                "worst": _worst_ratio(distances),
                "distances": distances[:: _stride(steps)],
            }
        reflected = {}
        for a in REFLECTED:
            model.layer.solver, model.layer.max_steps, model.layer.rtol = PeacemanRachford(a), steps, 1e-10
            reflected[f"{a:g}"] = _relative(model.solve(X).value, Z)
        plain = _distances(lambda z: torch.relu(z @ W.t() + C), Z, min(steps, 500))
        return {
            "norm": float(torch.linalg.matrix_norm(W, ord=2)),
            "L": L,
            "forward": forward,
            "reflected": reflected,
            "plain": plain,
        }

    def judge(self, config: SplittingConfig, results: Sequence[Result]) -> Mapping[str, ClaimFinding]:
        pairs = [(f["worst"], f["bound"]) for r in results for f in r.values["forward"].values()]
        excess = [worst - bound for worst, bound in pairs]
        distances = [value for r in results for value in r.values["reflected"].values()]
        plain = {skew: [r.values["plain"][-1] for r in results if r.task["skew"] == skew] for skew in config.skews}
        norms = {skew: [r.values["norm"] for r in results if r.task["skew"] == skew] for skew in config.skews}
        found = all(value <= FOUND for values in plain.values() for value in values)
        text = ", ".join(f"B x {k:g} (|W| {spread(norms[k])}): distance {spread(plain[k])}" for k in config.skews)
        return {
            "forward_backward": decide(
                max(excess) <= SLACK,
                f"{len(pairs)} runs, greatest factor minus its bound {max(excess):.3g}",
                excess=max(excess),
            ),
            "peaceman_rachford": decide(
                max(distances) <= FOUND,
                f"{len(distances)} runs, greatest relative distance {max(distances):.2g}",
                distances=distances,
            ),
            "plain": decide(found, text, **{f"{skew:g}": values for skew, values in plain.items()}),
        }

    def panels(self, config: SplittingConfig, results: Sequence[Result]) -> list[dict[str, Any]]:
        labels = {"x_label": "step", "y_label": "relative distance to the equilibrium", "y_scale": "log"}
        plain = [_curve(f"B x {s:g}", [r.values["plain"] for r in results if r.task["skew"] == s], 1) for s in config.skews]
        panels = [{"title": "plain iteration", **labels, "curves": plain}]
        for skew in config.skews[:2]:
            chosen = [r.values["forward"] for r in results if r.task["skew"] == skew]
            every = _stride(config.steps)
            curves = [_curve(f"a = {p:g} m/L^2", [f[f"{p:g}"]["distances"] for f in chosen], every) for p in FORWARD]
            panels.append({"title": f"forward-backward, B x {skew:g}", **labels, "curves": curves})
        return panels


def network(task: Task) -> tuple[MonotoneDEQ, Tensor]:
    """The network of a task in float64, with B scaled by `skew`, and its inputs of norm sqrt(d)."""
    generator = torch.Generator().manual_seed(task["seed"])
    draw: dict[str, Any] = {"generator": generator, "dtype": torch.float64}
    model = MonotoneDEQ(task["features"], task["width"], margin=task["margin"], on_failure="ignore", **draw)
    with torch.no_grad():
        model.B.mul_(task.get("skew", 1.0))
    X = torch.randn(task["n"], task["features"], **draw)
    return model, X / X.norm(dim=1, keepdim=True) * math.sqrt(task["features"])


def dense_equilibrium(W: Tensor, C: Tensor) -> Tensor:
    """z = relu(W z + c) to rounding: Peaceman-Rachford by a dense inverse finds the active units, a
    dense solve the values."""
    identity = torch.eye(len(W), dtype=W.dtype)
    L = float(torch.linalg.matrix_norm(identity - W, ord=2))
    a = 1 / L
    resolvent = torch.linalg.inv(identity + a * (identity - W)).t()
    u, z = torch.zeros_like(C), torch.zeros_like(C)
    for _ in range(5000):
        reflected = 2 * z - u
        u = torch.matmul(reflected + a * C, resolvent).mul(2).sub(reflected)
        z = torch.relu(u)
    rows = []
    for active, c in zip(z > 0, C, strict=True):
        row = torch.zeros_like(c)
        row[active] = torch.linalg.solve(identity[active][:, active] - W[active][:, active], c[active])
        rows.append(row)
    Z = torch.stack(rows)
    if not torch.allclose(Z, torch.relu(Z @ W.t() + C), rtol=0, atol=1e-9 * float(Z.abs().max())):
        raise AssertionError("The active units were not found; this equilibrium needs more steps of its reference solver.")
    return Z


def _stride(steps: int) -> int:
    """Of the distances that are kept for the figure."""
    return max(1, steps // 100)


def _distances(step: Any, Z: Tensor, steps: int) -> list[float]:
    """Relative distances to Z along an iteration from 0, until it is there, or lost."""
    z, found = torch.zeros_like(Z), [1.0]
    for _ in range(steps):
        z = step(z)
        found.append(_relative(z, Z))
        if not ROUNDING < found[-1] < 1e12:
            break
    return found


def _relative(z: Tensor, Z: Tensor) -> float:
    return float(torch.linalg.norm(z - Z) / torch.linalg.norm(Z))


def _worst_ratio(distances: Sequence[float]) -> float:
    return max(later / earlier for earlier, later in zip(distances, distances[1:], strict=False) if later > ROUNDING)


def _curve(label: str, rows: Sequence[Sequence[float]], every: int) -> dict[str, Any]:
    length = max(map(len, rows))
    y = [[*row, *[None] * (length - len(row))] for row in rows]
    return {"label": label, "x": [every * k for k in range(length)], "y": y}
