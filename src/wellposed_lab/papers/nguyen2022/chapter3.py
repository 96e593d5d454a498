"""[nguyen2022, Chapter 3]: tangent kernel and descent of a monotone network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from wellposed.kernel import tangent_kernel
from wellposed_lab.papers.claims import Claim, ClaimFinding, decide
from wellposed_lab.papers.experiment import AbstractExperiment, ExperimentConfig, Result, Task
from wellposed_lab.papers.nguyen2022.splitting import network
from wellposed_lab.papers.whole_descent import whole_descent

__all__ = ["Chapter3", "Chapter3Config"]

#: Relative difference of two roads to one kernel in float64.
SAME = 1e-7
#: About how many losses of a run are kept; the number of steps that raised it is over all of them.
LOOKS = 100
#: "converges to a global optimum" within a finite training: the loss falls below this part of its start.
SOLVED = 1e-3
#: Below this part of its start the loss is the square of the error of the solves, whose relative tolerance is `RTOL`.
RTOL, FLOOR = 1e-11, 1e-18


@dataclass(frozen=True, kw_only=True)
class Chapter3Config(ExperimentConfig):
    """Sizes."""

    widths: tuple[int, ...] = (40, 80)  # units; the theorems ask for at least n
    features: int = 20  # features, n: of the inputs
    n: int = 10
    margin: float = 0.5  # m
    steps: int = 100  # of descent, with the step 1/lambda_max(H) of the start


class Chapter3(AbstractExperiment):
    """Random monotone networks with random labels."""

    name = "nguyen2022/chapter3"
    title = "tangent kernel and descent of monotone networks"
    claims = (
        Claim(
            "kernel",
            "The tangent kernel is J_A J_A^T + J_B J_B^T + J_U J_U^T + Z^T Z in closed form.",
            "[nguyen2022, Proposition 4], corrected",
            f"it agrees with per-sample gradients to {SAME:g}, in every run",
        ),
        Claim(
            "features",
            "|Z|_F <= |X|_F |U|/m.",
            "[nguyen2022, Lemma 3.3.3]",
            "the ratio is at most 1 at start and end of every run",
        ),
        Claim(
            "positive",
            "The kernel is positive definite at a random start.",
            "[nguyen2022, Section 3.3]",
            "lambda_min(H)/lambda_max(H) exceeds 1e-12 in every run",
        ),
        Claim(
            "linear",
            "Gradient descent converges to zero loss at a linear rate.",
            "[nguyen2022, Theorem 3.3.5]",
            f"in every run it ends below {SOLVED:g} of its start, and each step lowers it until it is {FLOOR:g} of that",
        ),
    )
    departures = (
        "The step is 1/lambda_max(H) of the start, as for practical training: the corrected conditions of Theorem 3.3.5 do not "
        "hold at these starts, and its steps would be too small to see a change.",
    )
    varied = {"width": "widths"}
    quick = Chapter3Config()
    full = Chapter3Config(widths=(60, 120, 240), features=60, n=30, steps=1000)

    def run(self, task: Task) -> dict[str, Any]:
        model, X = network(task)
        y = torch.randn(task["n"], generator=torch.Generator().manual_seed(task["seed"] + 1), dtype=X.dtype)
        model.layer.rtol, model.layer.max_steps = RTOL, 2000
        H = tangent_kernel(model, X, method="closed")
        other = tangent_kernel(model, X, method="generic")
        eigenvalues = torch.linalg.eigvalsh(H)

        def ratio() -> float:
            Z, U = model.solve(X).value, torch.linalg.matrix_norm(model.U.detach(), ord=2)
            return float(torch.linalg.norm(Z) * task["margin"] / (torch.linalg.norm(X) * U))

        ratios = [ratio()]
        history = whole_descent(model, X, y, step_size=1 / float(eigenvalues[-1]), steps=task["steps"])
        loss = history.loss.tolist()
        looks = sorted({*range(0, len(loss), max(1, task["steps"] // LOOKS)), len(loss) - 1})
        return {
            "difference": float(torch.linalg.norm(H - other) / torch.linalg.norm(H)),
            "eigenvalues": [float(eigenvalues[0]), float(eigenvalues[-1])],
            "ratios": [*ratios, ratio()],
            "rises": sum(later >= earlier > FLOOR * loss[0] for earlier, later in pairwise(loss)),
            "step": looks,
            "loss": [loss[step] for step in looks],
        }

    def judge(self, config: Chapter3Config, results: Sequence[Result]) -> Mapping[str, ClaimFinding]:
        of = [result.values for result in results]
        differences, ratios = [v["difference"] for v in of], [ratio for v in of for ratio in v["ratios"]]
        conditions = [v["eigenvalues"][0] / v["eigenvalues"][1] for v in of]
        left = [v["loss"][-1] / v["loss"][0] for v in of]
        rises = sum(v["rises"] for v in of)
        return {
            "kernel": decide(max(differences) <= SAME, f"relative difference at most {max(differences):.2g} in {len(of)} runs"),
            "features": decide(max(ratios) <= 1, f"ratio at most {max(ratios):.3g} in {len(of)} runs", greatest=max(ratios)),
            "positive": decide(
                min(conditions) > 1e-12,
                f"lambda_min/lambda_max at least {min(conditions):.3g} in {len(of)} runs",
                values=conditions,
            ),
            "linear": decide(
                rises == 0 and max(left) < SOLVED,
                f"part of the loss left {min(left):.2g} to {max(left):.2g} in {len(of)} runs; steps that raised it: {rises}",
                left=left,
            ),
        }

    def panels(self, config: Chapter3Config, results: Sequence[Result]) -> list[dict[str, Any]]:
        curves = []
        for width in sorted(set(config.widths)):
            of = [result.values for result in results if result.task["width"] == width]
            x = max((values["step"] for values in of), key=len)  # a run that diverges is shorter
            y = [[*values["loss"], *[None] * (len(x) - len(values["loss"]))] for values in of]
            curves.append({"label": f"width {width}", "x": x, "y": y})
        return [{"title": "gradient descent", "x_label": "step", "y_label": "loss", "y_scale": "log", "curves": curves}]
