"""The picture of a proof from the start: the measured loss of descent, and the bound that is
proved.

    python examples/proof_picture.py [--out proof_from_the_start.png]

A `GaussianDEQ` with 200 units fits 10 random points by plain descent with the step size
1/lambda_max. Up to step K the proof follows descent; then Theorem B of docs/certificates.md takes
over.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import wellposed as wp

BLUE, RED = "#0072B2", "#D55E00"  # distinct also for most colour-blind readers


def measure(more: int) -> tuple[wp.Proof, list[float], list[float]]:
    """A proof, the measured losses of descent, and the proved bounds of them."""
    X, y = wp.data.load("sphere", n=10, features=50, norm="sqrt_d", seed=0, dtype=torch.float64)
    net = wp.GaussianDEQ(50, 200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    proof = wp.prove(net, X, y)
    history = wp.descend(net, X, y, step_size=proof.step_size, steps=proof.num_steps + more)
    return proof, history.loss.tolist(), [proof.loss_bound(k) for k in range(len(history.loss))]


def draw(proof: wp.Proof, loss: list[float], bound: list[float], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 3.2), layout="constrained", facecolor="white")
    ax = figure.subplots()
    steps, top = range(len(loss)), 10 * bound[0]
    ax.fill_between(steps, bound, top, color=RED, alpha=0.12, linewidth=0)
    ax.plot(steps, bound, "--", color=RED, linewidth=2)
    ax.plot(steps, loss, color=BLUE, linewidth=2.4)
    ax.axvline(proof.num_steps, color="0.5", linewidth=1)
    K = proof.num_steps
    ax.annotate("followed step by step", (K, top), (-8, -16), textcoords="offset points", color="0.4", ha="right", fontsize=10)
    ax.annotate("the tail theorem, for ever", (K, top), (8, -16), textcoords="offset points", color="0.4", fontsize=10)
    at = K + (len(loss) - K) // 2
    ax.annotate("proved", (at, bound[at]), (0, 8), textcoords="offset points", color=RED, fontsize=11)
    ax.annotate("measured", (at, loss[at]), (-8, -4), textcoords="offset points", color=BLUE, fontsize=11, ha="right", va="top")
    limits = {"xlim": (0, len(loss) - 1), "ylim": (loss[-1], top)}
    ax.set(xlabel="step of gradient descent", ylabel="training loss", yscale="log", **limits)
    ax.grid(alpha=0.25)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the picture of a proof from the start.")
    parser.add_argument("--out", type=Path, default=Path("proof_from_the_start.png"))
    parser.add_argument("--more", type=int, default=40, help="steps after the last one that the proof follows")
    options = parser.parse_args()
    proof, loss, bound = measure(options.more)
    print(proof)
    assert all(a <= b for a, b in zip(loss, bound, strict=True))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    draw(proof, loss, bound, options.out)
    print(f"picture: {options.out}")


if __name__ == "__main__":
    main()
