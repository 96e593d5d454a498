"""What the experiments with convolutional OptEq networks share: stem and head, one training loop, a
ledger of finished runs.

Every network of a comparison has the same stem and the same head around its implicit part, sees the
same images in the same order and is trained by AdamW with a cosine schedule, so that what differs
is the implicit part.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import wellposed as wp
from wellposed.nn import EquilibriumLayer

Loss = Callable[[Tensor, Tensor], Tensor]
Evaluate = Callable[[nn.Module], dict[str, float]]


def stem(channels: int, reduce: int) -> nn.Sequential:
    """One 3x3 convolution with stride 2 and, for reduce = 4, an average over 2 x 2: images to
    features of 1/reduce the size."""
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, stride=min(reduce, 2), padding=1), nn.BatchNorm2d(channels), nn.ReLU()]
    return nn.Sequential(*layers, *([nn.AvgPool2d(reduce // 2)] if reduce > 2 else []))


def head(channels: int, classes: int = 10) -> nn.Sequential:
    """Normalisation, averages over a 4 x 4 grid of regions, a linear layer."""
    return nn.Sequential(nn.BatchNorm2d(channels), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * channels, classes))


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def standardized(data: Any, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training and test images (n, 3, height, width) with the mean and spread of the training
    images removed; their labels."""
    mean, spread = data.X.mean(dim=(0, 2, 3), keepdim=True), data.X.std(dim=(0, 2, 3), keepdim=True)
    X, X_test = (((images - mean) / spread).to(device) for images in (data.X, data.X_test))
    return X, data.y.long().to(device), X_test, data.y_test.long().to(device)


def cifar10(options: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The images of a run; with `--tune` the test images are a fifth of the training images, and no
    test image is touched."""
    data = wp.data.load("cifar10", options.images, n_test=options.test_images, flatten=False, seed=options.seed)
    X, y, X_test, y_test = standardized(data, options.device)
    if options.tune:
        order = torch.randperm(len(X), generator=torch.Generator().manual_seed(options.seed)).to(X.device)
        kept, held = order[len(X) // 5 :], order[: len(X) // 5]
        return X[kept], y[kept], X[held], y[held]
    return X, y, X_test, y_test


def accuracy(X: Tensor, y: Tensor) -> Evaluate:
    """The share of images that are classified rightly, and the share whose equilibrium
    converged."""

    def evaluate(model: nn.Module) -> dict[str, float]:
        right, solved = 0, Solves(model)
        for i in range(0, len(X), 100):
            right += int((model(X[i : i + 100]).argmax(dim=1) == y[i : i + 100]).sum())
            solved.note()
        return {"accuracy": right / len(X), **{f"test_{name}": value for name, value in solved.summary().items()}}

    return evaluate


class Solves:
    """The solves of the equilibrium layer of a model, batch by batch; empty for a model without
    one."""

    def __init__(self, model: nn.Module) -> None:
        self._layer = next((part for part in model.modules() if isinstance(part, EquilibriumLayer)), None)
        self._steps: list[float] = []
        self._adjoint: list[float] = []
        self._converged: list[float] = []

    def note(self, *, backward: bool = False) -> None:
        if self._layer is None:
            return
        solution = self._layer.last_solution
        self._steps.append(float(solution.num_steps.double().mean()))
        self._converged.append(float(solution.converged.double().mean()))
        if backward and isinstance(self._layer.gradient, wp.ImplicitGradient):
            self._adjoint.append(float(self._layer.last_adjoint.num_steps.double().mean()))

    def summary(self) -> dict[str, float]:
        parts = {"steps": self._steps, "adjoint_steps": self._adjoint, "converged": self._converged}
        return {name: sum(values) / len(values) for name, values in parts.items() if values}


def fit(
    model: nn.Module, X: Tensor, y: Tensor, loss: Loss, evaluate: Evaluate, options: argparse.Namespace, *, lr: float
) -> dict[str, Any]:
    """Trains; what it took and what came of it, epoch by epoch. CPU seconds are those of this
    process, training only."""
    per_epoch = -(-len(X) // options.batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=options.weight_decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs * per_epoch)
    generator = torch.Generator().manual_seed(options.seed)
    epochs, curve = [], []
    for _ in range(options.epochs):
        model.train()
        losses, solves, began = [], Solves(model), time.process_time()
        for rows in torch.randperm(len(X), generator=generator).to(X.device).split(options.batch):
            optimizer.zero_grad()
            value = loss(model(X[rows]), y[rows])
            value.backward()
            optimizer.step()
            schedule.step()
            losses.append(float(value.detach()))
            solves.note(backward=True)
        seconds = time.process_time() - began
        curve += [sum(part) / len(part) for part in (losses[i : i + 20] for i in range(0, len(losses), 20))]
        model.eval()
        with torch.no_grad():
            result = evaluate(model)
        epochs.append({"train_loss": sum(losses) / len(losses), "cpu_seconds": seconds, **solves.summary(), **result})
        if not math.isfinite(losses[-1]):
            break
    return {"history": epochs, "loss_every_20_batches": [round(value, 4) for value in curve]}


class Ledger:
    """Finished runs as lines of JSON. A run that is there already is not made again, so an
    interruption loses only one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.runs: list[dict[str, Any]] = []
        if path.exists():
            self.runs = [json.loads(line) for line in path.read_text().splitlines()]

    def has(self, **key: Any) -> bool:
        return any(all(run.get(name) == value for name, value in key.items()) for run in self.runs)

    def add(self, run: dict[str, Any]) -> None:
        self.runs.append(run)
        with self.path.open("a") as file:
            file.write(json.dumps(run) + "\n")
        last = {name: value for name, value in run["history"][-1].items() if isinstance(value, float)}
        print(run["name"], *(f"{name} {value:.4g}" for name, value in last.items()), flush=True)


def parser(description: str, **defaults: Any) -> argparse.ArgumentParser:
    """The options that all experiments share."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--images", type=int, default=defaults.get("images", 10_000))
    made.add_argument("--test-images", type=int, default=defaults.get("test_images", 2000))
    made.add_argument("--epochs", type=int, default=defaults.get("epochs", 2))
    made.add_argument("--batch", type=int, default=defaults.get("batch", 64))
    made.add_argument("--weight-decay", type=float, default=1e-3)
    made.add_argument("--reduce", type=int, choices=(1, 2, 4), default=4, help="equilibria live on 1/reduce of the image")
    made.add_argument("--tune", action="store_true", help="test on a fifth of the training images, to choose a learning rate")
    made.add_argument("--device", default="cpu")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--out", type=Path, default=Path("opteq_runs.jsonl"), help="ledger of finished runs")
    return made


def configuration(options: argparse.Namespace) -> dict[str, Any]:
    """The options that decide a run, for the ledger."""
    names = ("images", "test_images", "epochs", "batch", "weight_decay", "reduce", "tune", "seed")
    return {name: getattr(options, name) for name in names}
