"""Trains an equilibrium network on scikit-learn's handwritten digits and prints what it reached.

    python examples/digits.py --epochs 20 --width 64

The features of an image x are the solution of z = relu(W z + U x + b); |W| <= 0.9 by
parametrization, so that there is exactly one. Every solve, forward and backward, is checked sample
by sample: `on_failure="raise"` stops at the first that fails.
"""

from __future__ import annotations

import argparse
import time

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

import wellposed as wp


def load(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training and test images, (n, 64) in [0, 1], with their labels."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images / 16.0, labels, test_size=0.25, random_state=seed, stratify=labels)
    X, X_test = (torch.tensor(part, dtype=torch.float32) for part in parts[:2])
    y, y_test = (torch.tensor(part) for part in parts[2:])
    return X, y, X_test, y_test


def build(width: int, generator: torch.Generator) -> nn.Sequential:
    """An equilibrium layer and a linear read-out."""
    cell = wp.nn.DenseCell(64, width, weight=wp.nn.Spectral(bound=0.9), generator=generator)
    return nn.Sequential(wp.EquilibriumLayer(cell, on_failure="raise"), nn.Linear(width, 10))


@torch.no_grad()
def accuracy(model: nn.Module, X: Tensor, y: Tensor) -> float:
    """Part of the samples that are classified rightly."""
    return float((model(X).argmax(dim=1) == y).float().mean())


def train(model: nn.Sequential, X: Tensor, y: Tensor, *, epochs: int, generator: torch.Generator) -> None:
    """Adam on minibatches of 128, with a progress bar."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[news]}"))
    with Progress(*columns, TimeRemainingColumn()) as progress:
        task = progress.add_task("", total=epochs, news="")
        for _ in range(epochs):
            total = 0.0
            for rows in torch.randperm(len(X), generator=generator).split(128):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(X[rows]), y[rows])
                loss.backward()
                optimizer.step()
                total += loss.item() * len(rows)
            steps = int(model[0].last_solution.num_steps.max())
            progress.update(task, advance=1, news=f"loss {total / len(X):.4f}, equilibria in {steps} steps")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train an equilibrium network on scikit-learn's digits.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if min(options.epochs, options.width) < 1:
        parser.error("--epochs and --width must be at least 1")

    generator = torch.Generator().manual_seed(options.seed)
    torch.manual_seed(options.seed)  # for the read-out, which torch initializes from its global generator
    X, y, X_test, y_test = load(options.seed)
    model = build(options.width, generator)
    start = time.perf_counter()
    train(model, X, y, epochs=options.epochs, generator=generator)
    seconds = time.perf_counter() - start

    layer = model[0]
    solution = layer.solve(X_test)
    console = Console()
    console.print(f"{len(X)} training images, {options.epochs} epochs, {seconds:.1f} s")
    console.print(f"accuracy: {accuracy(model, X, y):.2%} on training, {accuracy(model, X_test, y_test):.2%} on test images")
    console.print(
        f"equilibria of the {len(X_test)} test images: {int(solution.converged.sum())} converged, residual at most "
        f"{float(solution.residual.max()):.1e}, {int(solution.num_steps.min())} to {int(solution.num_steps.max())} steps"
    )
    norm = wp.linalg.spectral_norm_upper(layer.cell.recurrent())
    bound = solution.error_bound(norm).max()
    console.print(f"|W| <= {norm:.4f}, so each is within {float(bound):.1e} of the only equilibrium there is")


if __name__ == "__main__":
    main()
