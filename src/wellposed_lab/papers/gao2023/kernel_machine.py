"""[gao2023, Lemma 4.4 and Theorem 4.1]: the network against its kernel machine, and the bound
against the test error over label noise."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from wellposed.certify import generalization_bound
from wellposed.data import Dataset
from wellposed.descent import State
from wellposed.kernel import KernelMachine, tangent_kernel
from wellposed.nn import ImplicitOnlyDEQ
from wellposed_lab.papers.claims import Claim, ClaimFinding, decide, not_tested, slope, spread
from wellposed_lab.papers.datasets import samples, two_classes
from wellposed_lab.papers.experiment import AbstractExperiment, ExperimentConfig, Result, Task, values_of
from wellposed_lab.papers.gao2023.figure1 import GAMMA0
from wellposed_lab.papers.whole_descent import whole_descent

__all__ = ["KernelMachineConfig", "KernelMachineStudy", "machine"]

#: The exponent of the width that Lemma 4.4 promises at least, with room for few widths and seeds.
EXPONENT, ROOM = -0.25, 0.05


@dataclass(frozen=True, kw_only=True)
class KernelMachineConfig(ExperimentConfig):
    """Sizes."""

    data: str = "mnist"  # name of a data set
    widths: tuple[int, ...] = (100, 200, 400)  # m
    n: int = 60  # n, n_test: samples to train and to test
    n_test: int = 100
    steps: int = 200  # of descent, with step 1/lambda_max(H(0))
    noise: tuple[float, ...] = (0.05, 0.1, 0.2, 0.3, 0.4)  # parts of the labels that are turned; 0 is added


class KernelMachineStudy(AbstractExperiment):
    """Widths with true labels; at the widest, labels of which a part is turned."""

    name = "gao2023/kernel"
    title = "the network, its kernel machine, and the generalization bound"
    claims = (
        Claim(
            "lemma4.4",
            "|f_t(x) - f^_t(x)| = O(m^(-1/4)) for all t: the network is near its kernel machine.",
            "[gao2023, Lemma 4.4]",
            "the slope of the log of the greatest root mean square distance over test samples along the training, against log "
            f"m, is at most {EXPONENT + ROOM:g}",
        ),
        Claim(
            "predicts",
            "The dominating term of the bound predicts the test accuracy.",
            "[gao2023, Section 4]",
            "over the parts of turned labels the test error (of true labels) has a rank correlation of at least 0.9 with the "
            "dominating term, for every seed",
        ),
        Claim(
            "bound",
            "The bound holds: the test error is below it.",
            "[gao2023, Theorem 4.1], without its unknown constant",
            "the test error is at most the dominating term, in every run",
        ),
    )
    departures = (
        "Descent in the place of gradient flow, with the step 1/lambda_max(H(0)); the kernel machine makes the same steps, so "
        "both are compared at the same time. Computed in float64. Theorem 4.1 has an unknown constant, which is taken to be 1, "
        "and sqrt((y - u)^T H^(-1) (y - u)/n) as its dominating term.",
    )
    quick = KernelMachineConfig()
    full = KernelMachineConfig(widths=(125, 250, 500, 1000), n=100, n_test=400, steps=300)

    def available(self, config: KernelMachineConfig) -> tuple[KernelMachineConfig, list[str]]:
        (data,), n, n_test, notes = two_classes((config.data,), config.n, config.n_test, paper="gao2023")
        return dataclasses.replace(config, data=data, n=n, n_test=n_test), notes

    def tasks(self, config: KernelMachineConfig) -> list[Task]:
        shared = config.part("data", "n", "n_test", "steps")
        pairs = [(m, 0.0) for m in sorted(config.widths)] + [(max(config.widths), part) for part in sorted(config.noise)]
        return [{"width": m, "noise": part, "seed": seed, **shared} for seed in config.seeds for m, part in pairs]

    def run(self, task: Task) -> dict[str, Any]:
        data = samples(task["data"], task["n"], task["n_test"], paper="gao2023", seed=task["seed"], dtype=torch.float64)
        generator = torch.Generator().manual_seed(task["seed"])
        options: dict[str, Any] = {"on_ill_posed": "ignore", "on_failure": "ignore", "dtype": torch.float64, "rtol": 1e-8}
        model = ImplicitOnlyDEQ(data.X.shape[1], task["width"], gamma0=GAMMA0, generator=generator, **options)
        turned = torch.randperm(len(data.y), generator=torch.Generator().manual_seed(task["seed"] + 1))
        y = data.y.clone()
        y[turned[: round(task["noise"] * len(y))]] *= -1
        assert data.X_test is not None and data.y_test is not None
        dominating = generalization_bound(model, data.X, y).dominating
        H = tangent_kernel(model, data.X)
        size = 1.0 / float(torch.linalg.eigvalsh(H)[-1])
        looks = sorted({round(task["steps"] ** (i / 10)) for i in range(11)})
        expected = machine(model, data, y, H, size, looks)
        watch = _Looks(data.X_test, looks)
        history = whole_descent(
            model, data.X, y, step_size=size, steps=task["steps"], callbacks=[watch], record_every=task["steps"]
        )
        gaps = [
            float((found - predicted).square().mean().sqrt()) for found, predicted in zip(watch.seen, expected, strict=True)
        ]
        return {
            "step": looks,
            "gap": gaps,
            "dominating": dominating,
            "test_error": float((torch.sign(watch.seen[-1]) != data.y_test).double().mean()),
            "machine_error": float((torch.sign(expected[-1]) != data.y_test).double().mean()),
            "loss": [float(history.loss[0]) / len(y), float(history.loss[-1]) / len(y)],
        }

    def judge(self, config: KernelMachineConfig, results: Sequence[Result]) -> Mapping[str, ClaimFinding]:
        widths, parts = sorted(set(config.widths)), [0.0, *sorted(config.noise)]
        gaps = {m: [max(row) for row in values_of(results, "gap", width=m, noise=0.0)] for m in widths}
        errors, bounds = (
            [values_of(results, k, width=widths[-1], noise=p) for p in parts] for k in ("test_error", "dominating")
        )
        ranks = [_rank_correlation(a, b) for a, b in zip(zip(*bounds, strict=True), zip(*errors, strict=True), strict=True)]
        text = ", ".join(
            f"{p:.0%} turned: error {spread(e)}, term {spread(b)}" for p, e, b in zip(parts, errors, bounds, strict=True)
        )
        pairs = [(r.values["test_error"], r.values["dominating"]) for r in results]
        above = sum(error > bound for error, bound in pairs)
        closest = min(bound - error for error, bound in pairs)
        findings = {
            "predicts": decide(min(ranks) >= 0.9, f"rank correlation {spread(ranks)}; {text}", ranks=ranks),
            "bound": decide(above == 0, f"{above} of {len(pairs)} runs are above; least distance {closest:.3g}", above=above),
        }
        if len(widths) < 2:
            return {**findings, "lemma4.4": not_tested("it needs at least two widths")}
        exponent = slope(widths, [statistics.fmean(gaps[m]) for m in widths])
        by_width = ", ".join(f"m={m}: {spread(found)}" for m, found in gaps.items())
        findings["lemma4.4"] = decide(exponent <= EXPONENT + ROOM, f"slope {exponent:.3f} ({by_width})", slope=exponent)
        return findings

    def panels(self, config: KernelMachineConfig, results: Sequence[Result]) -> list[dict[str, Any]]:
        widths, parts = sorted(set(config.widths)), [0.0, *sorted(config.noise)]
        step = results[0].values["step"]
        curves = [{"label": f"m = {m}", "x": step, "y": values_of(results, "gap", width=m, noise=0.0)} for m in widths]
        axes = {"x_label": "step", "y_label": "root mean square distance", "y_scale": "log"}
        noisy = []
        for label, key in (("test error", "test_error"), ("dominating term", "dominating")):
            columns = [values_of(results, key, width=widths[-1], noise=p) for p in parts]
            noisy.append({"label": label, "x": parts, "y": [list(row) for row in zip(*columns, strict=True)]})
        return [
            {"title": "network against kernel machine", **axes, "curves": curves},
            {"title": f"m = {widths[-1]}", "x_label": "part of turned labels", "y_label": "on test samples", "curves": noisy},
        ]


class _Looks:
    """Predictions for test samples at some steps."""

    def __init__(self, X: Tensor, looks: Sequence[int]) -> None:
        self.X, self.looks = X, set(looks)
        self.seen: list[Tensor] = []

    def on_step(self, state: State) -> None:
        """Called at every point of the descent."""
        if state.step in self.looks:
            self.seen.append(state.model(self.X).detach())


@torch.no_grad()
def machine(model: ImplicitOnlyDEQ, data: Dataset, y: Tensor, H: Tensor, size: float, looks: Sequence[int]) -> list[Tensor]:
    """Its predictions f^_k(x) for test samples, after some numbers k of steps."""
    assert data.X_test is not None
    cross, start = tangent_kernel(model, data.X_test, data.X), model(data.X_test)
    kernel_machine = KernelMachine(H, y, model(data.X), rtol=0.0, on_failure="ignore")
    return list(kernel_machine.predict_descent(looks, size, cross, f0=start))


def _rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's, with mean ranks for ties; 0 if one of them is constant."""

    def ranks(values: Sequence[float]) -> list[float]:
        return [sum(w < v for w in values) + (sum(w == v for w in values) + 1) / 2 for v in values]

    x, y = ranks(a), ranks(b)
    if len(set(x)) == 1 or len(set(y)) == 1 or not all(map(math.isfinite, (*a, *b))):
        return 0.0
    return statistics.correlation(x, y)
