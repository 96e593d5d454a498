"""The picture of the README: the loss of a certified descent, measured, against what was proved
before its first step.

    python examples/readme_picture.py [--out docs/images/measured_against_certified.png]

A `GaussianDEQ` with 200 units fits 10 random points. The certificate at the start licenses step
sizes and a rate; the descent takes exactly these steps. The picture has its own background, so that
it looks the same on light and dark pages.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import wellposed as wp

BLUE, RED = "#0072B2", "#D55E00"  # distinct also for most colour-blind readers


def measure(steps: int) -> wp.History:
    """A descent with certified steps."""
    X, y = wp.data.load("sphere", n=10, features=50, norm="sqrt_d", seed=0, dtype=torch.float64)
    net = wp.GaussianDEQ(50, 200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return wp.descend(net, X, y, step_size="certified", steps=steps)


def draw(history: wp.History, path: Path) -> None:
    from matplotlib.figure import Figure

    step, loss = history["step"].numpy(), history.loss.numpy()
    bound = history.certified_residual().numpy() ** 2 / 2
    figure = Figure(figsize=(7.2, 3.2), layout="constrained", facecolor="white")
    ax = figure.subplots()
    ax.fill_between(step, bound, bound[0] * 10, color=RED, alpha=0.12, linewidth=0)
    ax.plot(step, bound, "--", color=RED, linewidth=2)
    ax.plot(step, loss, color=BLUE, linewidth=2.4)
    middle = len(step) // 2
    ax.annotate(
        "proved before the first step:\nthe loss never enters here",
        (step[middle], bound[middle]),
        (6, 12),
        textcoords="offset points",
        color=RED,
        fontsize=11,
    )
    ax.annotate(
        "measured",
        (step[middle], loss[middle]),
        (-10, -6),
        textcoords="offset points",
        color=BLUE,
        fontsize=11,
        ha="right",
        va="top",
    )
    ax.set(
        xlabel="step of gradient descent",
        ylabel="training loss",
        yscale="log",
        xlim=(0, step[-1]),
        ylim=(loss[-1], bound[0] * 10),
    )
    ax.grid(alpha=0.25)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the picture of the README.")
    parser.add_argument("--out", type=Path, default=Path("docs/images/measured_against_certified.png"))
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args()
    if options.steps < 2:
        parser.error("--steps must be at least 2")
    history = measure(options.steps)
    assert (history.residual_norm <= history.certified_residual()).all()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    draw(history, options.out)
    proved = float(history.certified_residual()[-1]) ** 2 / 2
    print(f"loss {history.loss[0]:.2f} -> {history.loss[-1]:.1e}, proved: at most {proved:.1e}")
    print(f"picture: {options.out}")


if __name__ == "__main__":
    main()
