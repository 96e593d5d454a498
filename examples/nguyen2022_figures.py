"""Figures 4.1 to 4.5 of [nguyen2022] at a size for one CPU core, on scikit-learn's 8 x 8 digits.

    python examples/nguyen2022_figures.py 4.1 4.2          # residuals and trajectories, small
    against unit initialization python examples/nguyen2022_figures.py 4.3 --epochs 4   #
    trajectories over training, coloured by class python examples/nguyen2022_figures.py 4.4 --num 15
    # landscapes of repeat-6/11/18 and of the equilibrium python examples/nguyen2022_figures.py 4.5
    --num 15     # landscape of a multiscale equilibrium

The thesis uses MNIST and ImageNet; here the pictures have its kind, not its numbers. Records and
PNG files go to `--folder`.
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from sklearn.datasets import load_digits
from torch import Tensor, nn

import wellposed as wp
from wellposed.landscape import basin, project, surface, trajectory

loss = nn.functional.cross_entropy
console = Console()


def digits(n: int) -> tuple[Tensor, Tensor]:
    """(n, 1, 8, 8) images in [0, 1] and labels."""
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images[:n] / 16.0, dtype=torch.float32).reshape(-1, 1, 8, 8), torch.tensor(labels[:n])


def residual(init_std: float = 0.01) -> wp.nn.ResidualDEQ:
    """The network of the thesis, narrower; its solver is Anderson's with tolerance 1e-3 and 100
    evaluations."""
    generator = torch.Generator().manual_seed(0)
    return wp.nn.ResidualDEQ(
        1,
        16,
        10,
        init_std=init_std,
        input_gain=1.0,
        grid=2,
        solver=wp.Anderson(),
        rtol=1e-3,
        max_steps=100,
        on_failure="ignore",
        generator=generator,
    )


def injected(model: Any, gain: float = 3.0) -> Any:
    """The model with more weight on its input: x then outweighs z in the sum that is normalized,
    and the cell contracts.

    With the gain of 1 that norms have at first, training loses the equilibria of some images within
    a few epochs.
    """
    for module in model.cell.modules():
        if isinstance(module, wp.nn.ResidualCell):
            nn.init.constant_(module.norm2.weight, gain)
    return model


def train(model: Any, X: Tensor, y: Tensor, epochs: int) -> Iterator[float]:
    """Adam on minibatches of 32 with a falling step; after every epoch the loss of all images.

    Equilibrium networks get a Jacobian penalty, and all cells a smaller step than encoder and head:
    a cell that moves fast soon loses the equilibria of some images, and then there is no landscape
    to draw.
    """
    slow = list(model.cell.parameters())
    fast = [*model.encoder.parameters(), *model.head.parameters()]
    optimizer = torch.optim.Adam([{"params": slow, "lr": 3e-4}, {"params": fast, "lr": 1e-2}])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * math.ceil(len(X) / 32))
    generator = torch.Generator().manual_seed(1)
    for _ in range(epochs):
        for rows in torch.randperm(len(X), generator=generator).split(32):
            if hasattr(model, "penalized"):
                prediction, penalty = model.penalized(X[rows], generator=generator)
                total = loss(prediction, y[rows]) + 4.0 * penalty
            else:
                total = loss(model(X[rows]), y[rows])
            optimizer.zero_grad()
            total.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        with torch.no_grad():
            yield loss(model(X), y).item()


def train_to_best(model: Any, X: Tensor, y: Tensor, epochs: int) -> None:
    """Trains, and goes back to the epoch of the least loss among those where every image has one
    equilibrium, from all starts.

    Convergence from zero is not enough: after long training it is found from there, and from other
    starts for most images only.
    """
    best, kept = math.inf, None
    for value in train(model, X, y, epochs):
        if value < best and surface(model, loss, X, y, num=1).valid.all():
            best, kept = value, copy.deepcopy(model.state_dict())
    if kept is None:
        console.print("at no epoch all images had one equilibrium; the last one is shown")
    else:
        model.load_state_dict(kept)


def initializations(folder: Path, figures: list[str]) -> None:
    """Fig. 4.1 and 4.2: plain iteration with small and with unit weights."""
    X, _ = digits(30)
    ways = [trajectory(residual(std), X, solver=wp.Picard(), max_steps=50, rtol=1e-4) for std in (1.0, 0.01)]
    record = project(ways, names=["N(0, 1)", "N(0, 0.01^2)"])
    record.save(folder / "initializations.npz")
    for way, name in zip(ways, record.names, strict=True):
        console.print(f"weights {name}: {int(way.converged.sum())} of {len(X)} samples converged within 50 evaluations")
    if "4.1" in figures:
        wp.plot.residuals(record).savefig(folder / "figure_4_1.png", dpi=150)
    if "4.2" in figures:
        wp.plot.trajectories(record).savefig(folder / "figure_4_2.png", dpi=150)


def training(folder: Path, n: int, epochs: int) -> None:
    """Fig. 4.3: trajectories of the same images at initialization and after the first, middle and
    last epoch."""
    X, y = digits(n)
    model = injected(residual())
    shown = y < 4  # few enough classes to tell the colours apart
    ways, names = [trajectory(model, X[shown][:40])], ["initialization"]
    shown_epochs = {1, (1 + epochs) // 2, epochs}
    for epoch, value in enumerate(train(model, X, y, epochs), start=1):
        if epoch not in shown_epochs:
            continue
        ways.append(trajectory(model, X[shown][:40]))
        names.append(f"epoch {epoch}, loss {value:.2f}")
        console.print(f"{names[-1]}: {int(ways[-1].converged.sum())} of {len(ways[-1].converged)} samples converged")
    record = project(ways, names=names)
    record.save(folder / "training.npz")
    wp.plot.trajectories(record, labels=y[shown][:40].numpy()).savefig(folder / "figure_4_3.png", dpi=150)


def landscapes(folder: Path, models: dict[str, nn.Module], name: str, options: argparse.Namespace) -> None:
    """Fig. 4.4 and 4.5: each model trained, then its surface about where it ended."""
    X, y = digits(options.samples)
    found = []
    for title, model in models.items():
        train_to_best(model, X, y, options.epochs)
        file = folder / f"{name}_{title}.npz"
        file.unlink(missing_ok=True)  # another training gives another surface
        s = surface(model, loss, X, y, num=options.num, radius=options.radius, file=file, progress=True)
        found.append(s)
        center = s.values[options.num // 2, options.num // 2]
        console.print(f"{title}: loss at the centre {center:.3f}, {s.counts()}")
        if s.valid[options.num // 2, options.num // 2]:
            console.print(f"  {basin(s, level=1.2 * center)}")
        else:
            console.print(f"  at a point that failed, {np.nanmedian(s.failed[~s.valid]):.1%} of the samples did (median)")
    wp.plot.contour(found, names=list(models), log=True).savefig(folder / f"{name}.png", dpi=150)
    wp.plot.surface(found[-1], title=list(models)[-1], log=True).savefig(folder / f"{name}_surface.png", dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description="Figures 4.1 to 4.5 of [nguyen2022] at CPU size.")
    parser.add_argument("figures", nargs="+", choices=["4.1", "4.2", "4.3", "4.4", "4.5"])
    parser.add_argument("--folder", type=Path, default=Path("figures"))
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--num", type=int, default=15, help="points along each direction; 51 in the thesis")
    parser.add_argument("--radius", type=float, default=0.5)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    if {"4.1", "4.2"} & set(options.figures):
        initializations(options.folder, options.figures)
    if "4.3" in options.figures:
        training(options.folder, options.samples, options.epochs)
    if "4.4" in options.figures:
        base = injected(residual())
        twins: dict[str, nn.Module] = {f"repeat-{k}": base.twin(k) for k in (6, 11, 18)}
        landscapes(options.folder, {**twins, "equilibrium": base}, "figure_4_4", options)
    if "4.5" in options.figures:
        generator = torch.Generator().manual_seed(0)
        multi = wp.nn.MultiscaleDEQ.classifier(
            1, (16, 16), 10, grid=2, solver=wp.Anderson(), rtol=1e-3, max_steps=100, on_failure="ignore", generator=generator
        )
        landscapes(options.folder, {"multiscale": injected(multi)}, "figure_4_5", options)


if __name__ == "__main__":
    main()
