"""Trains a monotone equilibrium classifier, certifies how far its test images may be moved, and
prints both.

    python examples/monotone_digits.py --form conv --epochs 10
    WELLPOSED_DATA=... python examples/monotone_digits.py --data mnist --samples 6000 --form dense

`digits` comes with scikit-learn; `mnist`, `fashion_mnist`, `cifar10` and `svhn` are read from
<name>.npz in $WELLPOSED_DATA. Every solve, forward and backward, is checked sample by sample:
`on_failure="raise"` stops at the first that fails.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import wellposed as wp


def load(name: str, samples: int | None, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training and test images (n, C, H, W) in [0, 1], and labels; `samples` of the training part,
    drawn at random."""
    if name == "digits":
        from sklearn.datasets import load_digits

        digits = load_digits()
        images, labels = digits.images[:, None] / 16.0, digits.target
        order = np.random.default_rng(seed).permutation(len(images))
        train, test = order[:1350], order[1350:]
        parts = images[train], labels[train], images[test], labels[test]
    else:
        with np.load(Path(os.environ["WELLPOSED_DATA"]) / f"{name}.npz") as file:
            parts = tuple(file[key] for key in ("x_train", "y_train", "x_test", "y_test"))
        grey = parts[0].ndim == 3
        parts = tuple(
            (x[:, None] if grey else x.transpose(0, 3, 1, 2)) / 255.0 if i % 2 == 0 else x for i, x in enumerate(parts)
        )
    X, X_test = (torch.tensor(parts[i], dtype=torch.float32) for i in (0, 2))
    y, y_test = (torch.tensor(parts[i].astype(np.int64)) for i in (1, 3))
    rows = torch.randperm(len(X), generator=torch.Generator().manual_seed(seed))[:samples]
    return X[rows], y[rows], X_test, y_test


def build(form: str, image: tuple[int, int, int], options: argparse.Namespace) -> wp.nn.MonotoneClassifier:
    """The three forms, of comparable size."""
    generator = torch.Generator().manual_seed(options.seed)
    settings = {"margin": options.margin, "generator": generator, "rtol": 1e-4, "on_failure": "raise", "max_steps": 2000}
    if form == "dense":
        return wp.nn.MonotoneClassifier.dense(image[0] * image[1] * image[2], options.width, 10, **settings)
    grid = 4 if image[1] % 4 == 0 else 1
    if form == "conv":
        return wp.nn.MonotoneClassifier.conv(image, options.width, 10, grid=grid, **settings)
    tiers = (options.width, 2 * options.width)
    return wp.nn.MonotoneClassifier.multitier(image, tiers, 10, grid=2 if image[1] % 4 == 0 else 1, **settings)


@torch.no_grad()
def accuracy(model: nn.Module, X: Tensor, y: Tensor) -> float:
    """Part of the samples that are classified rightly."""
    right = [(model(X[rows]).argmax(dim=1) == y[rows]).sum() for rows in torch.arange(len(X)).split(500)]
    return float(sum(right) / len(X))


def train(model: wp.nn.MonotoneClassifier, X: Tensor, y: Tensor, *, epochs: int, seed: int) -> None:
    """Adam on minibatches of 128, with the rate lowered along a cosine."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for epoch in range(epochs):
        total, began = 0.0, time.perf_counter()
        for rows in torch.randperm(len(X), generator=generator).split(128):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(X[rows]), y[rows])
            loss.backward()
            optimizer.step()
            total += loss.item() * len(rows)
        schedule.step()
        steps = int(model.layer.last_solution.num_steps.max())
        seconds = time.perf_counter() - began
        print(f"epoch {epoch + 1}: loss {total / len(X):.4f}, equilibria in at most {steps} steps, {seconds:.1f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", default="digits", choices=["digits", "mnist", "fashion_mnist", "cifar10", "svhn"])
    parser.add_argument("--form", default="dense", choices=["dense", "conv", "multitier"])
    parser.add_argument("--samples", type=int, help="training samples to use; all if not given")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--width", type=int, default=40, help="units, or channels of the finest tier")
    parser.add_argument("--margin", type=float, default=1.0)
    parser.add_argument("--certify", type=int, default=100, help="test samples to certify")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    X, y, X_test, y_test = load(options.data, options.samples, options.seed)
    model = build(options.form, tuple(X.shape[1:]), options)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{options.data}, {options.form}: {len(X)} training samples, {parameters} parameters")
    train(model, X, y, epochs=options.epochs, seed=options.seed)
    print(f"accuracy on {len(X)} training samples: {accuracy(model, X, y):.2%}")
    print(f"accuracy on {len(X_test)} test samples: {accuracy(model, X_test, y_test):.2%}")
    bounds = wp.certify.lipschitz_upper(model)
    print(
        f"Lipschitz constant of the logits: at most {bounds.logits:.2f}; |U|/m = {bounds.equilibrium:.2f} for the equilibrium"
    )
    n = options.certify
    small = X_test[0].numel() <= 100  # sharpening a radius costs the cube of that, several times per sample
    result = wp.certify.robustness(model, X_test[:n], y_test[:n], local=small)
    for radius in (0.05, 0.1, 0.2, 0.5):
        print(f"provably right under every perturbation of length {radius}: {result.certified_accuracy(radius):.0%} of {n}")


if __name__ == "__main__":
    main()
