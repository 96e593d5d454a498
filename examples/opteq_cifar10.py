"""The convolutional OptEq on part of CIFAR-10: which alpha, which prior, unrolled or implicit.

    WELLPOSED_DATA=folder python examples/opteq_cifar10.py --images 1000 --epochs 2 --alphas 0.4 1.0

A small version of Table 1a of Xie et al. (2021), sized for a CPU. The paper's network is `--channels 16 32 64 128 128
--state-channels 32 --size 32`, on all images and for 200 epochs: for who has a GPU (`--device cuda`).
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch import Tensor, nn

import wellposed as wp

PRIORS = {
    "none": None,
    "l1": wp.convex.L1(0.01),
    "squared l2": wp.convex.SquaredL2(0.05),
    "decorrelation": wp.convex.GradientStep(wp.convex.Decorrelation(0.01, across="pixels"), 0.1),
}


def load(options: argparse.Namespace) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training and test images, (n, 3, size, size), standardised, with their labels."""
    data = wp.data.load(
        "cifar10", options.images, n_test=options.test_images, size=options.size, flatten=False, seed=options.seed
    )
    mean, spread = data.X.mean(dim=(0, 2, 3), keepdim=True), data.X.std(dim=(0, 2, 3), keepdim=True)
    X, X_test = ((images - mean) / spread for images in (data.X, data.X_test))
    return tuple(t.to(options.device) for t in (X, data.y.long(), X_test, data.y_test.long()))


def build(alpha: float, prior: Any, options: argparse.Namespace) -> wp.convex.ConvOptEq:
    torch.manual_seed(options.seed)
    gradient = wp.UnrolledGradient(20) if options.gradient == "unrolled" else wp.ImplicitGradient()
    return wp.convex.ConvOptEq(
        3,
        tuple(options.channels),
        state_channels=options.state_channels,
        feature_channels=options.feature_channels,
        alpha=alpha,
        prior=prior,
        gradient=gradient,
        rtol=1e-3,
        on_failure="ignore",
        generator=torch.Generator().manual_seed(options.seed),
    ).to(options.device)


def train(model: nn.Module, X: Tensor, y: Tensor, options: argparse.Namespace) -> None:
    """SGD with momentum and a falling step, minibatches of 64."""
    batches = options.epochs * -(-len(X) // 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=3e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, batches)
    generator = torch.Generator().manual_seed(options.seed)
    for _ in range(options.epochs):
        for rows in torch.randperm(len(X), generator=generator).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(X[rows]), y[rows]).backward()
            optimizer.step()
            schedule.step()


@torch.no_grad()
def accuracy(model: nn.Module, X: Tensor, y: Tensor) -> float:
    right = sum(int((model(X[i : i + 100]).argmax(dim=1) == y[i : i + 100]).sum()) for i in range(0, len(X), 100))
    return right / len(X)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train convolutional OptEq networks on part of CIFAR-10.")
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--test-images", type=int, default=500)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--size", type=int, default=16)
    parser.add_argument("--alphas", type=float, nargs="+", default=[0.1, 0.4, 1.0])
    parser.add_argument("--priors", nargs="+", choices=list(PRIORS), default=["none"])
    parser.add_argument("--gradient", choices=("implicit", "unrolled"), default="implicit")
    parser.add_argument("--channels", type=int, nargs="+", default=[16, 16, 32])
    parser.add_argument("--state-channels", type=int, default=16)
    parser.add_argument("--feature-channels", type=int, default=16)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_flush_denormal(True)  # cotangents of an unrolled contraction become subnormal, which is slow

    X, y, X_test, y_test = load(options)
    print(f"{len(X)} training images of {options.size} x {options.size}, {options.epochs} epochs, {options.gradient} gradient")
    print("| alpha | prior | parameters | test accuracy | contraction <= | seconds |")
    print("|---|---|---|---|---|---|")
    for alpha in options.alphas:
        for name in options.priors:
            model = build(alpha, PRIORS[name], options)
            began = time.perf_counter()
            train(model, X, y, options)
            seconds = time.perf_counter() - began
            size = sum(p.numel() for p in model.parameters())
            result = f"{accuracy(model, X_test, y_test):.1%} | {model.contraction_upper():.3f} | {seconds:.0f}"
            print(f"| {alpha:g} | {name} | {size} | {result} |", flush=True)


if __name__ == "__main__":
    main()
