"""The convolutional OptEq next to other implicit networks, with equal parameters, images and epochs.

    WELLPOSED_DATA=folder python examples/opteq_contenders.py --images 1000 --epochs 2 --parameters 20000

A small version of Table 1b of Xie et al. (2021), sized for a CPU: a deep OptEq, a monotone network with one convolution, a
Neural ODE and an augmented one (both through torchdiffeq). Widths are the largest within the budget of parameters. The
paper's sizes are `--channels 16 32 64 64 128 --parameters 172000 --size 32 --images 50000 --epochs 200`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from opteq_cifar10 import accuracy, load, train
from torch import Tensor, nn
from torchdiffeq import odeint_adjoint

import wellposed as wp

#: A network of a width, for images of a size; `channels` are those of the layers of the deep OptEq.
Make = Callable[[int, int, tuple[int, ...]], nn.Module]


class Field(nn.Module):
    """dz/dt = conv1(relu(conv3(relu(conv1(z, t))))), the field of Dupont et al. (2019) for images."""

    def __init__(self, channels: int, filters: int) -> None:
        super().__init__()
        sizes = [(channels + 1, filters, 1), (filters, filters, 3), (filters, channels, 1)]
        self.layers = nn.ModuleList(nn.Conv2d(a, b, k, padding=k // 2) for a, b, k in sizes)
        self.evaluations = 0

    def forward(self, t: Tensor, z: Tensor) -> Tensor:
        self.evaluations += 1
        time_channel = torch.ones_like(z[:, :1]) * t
        z = self.layers[0](torch.cat([z, time_channel], dim=1))
        for layer in self.layers[1:]:
            z = layer(torch.relu(z))
        return z


class NeuralODE(nn.Module):
    """z(1) of dz/dt = field, z(0) the image with `augmented` channels of zeros; average pooling and a linear read-out."""

    def __init__(self, filters: int, augmented: int) -> None:
        super().__init__()
        self.augmented, self.field = augmented, Field(3 + augmented, filters)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * (3 + augmented), 10))

    def forward(self, X: Tensor) -> Tensor:
        z = torch.cat([X, X.new_zeros(len(X), self.augmented, *X.shape[2:])], dim=1)
        ends = torch.tensor([0.0, 1.0], dtype=X.dtype, device=X.device)
        z = odeint_adjoint(self.field, z, ends, rtol=1e-3, atol=1e-3, method="dopri5")[1]
        return self.head(z)


def deep_opteq(width: int, size: int, channels: tuple[int, ...]) -> nn.Module:
    return wp.convex.ConvOptEq(
        3, channels, state_channels=width, feature_channels=width, alpha=0.8, rtol=1e-3, on_failure="ignore"
    )


def monotone(width: int, size: int, channels: tuple[int, ...]) -> nn.Module:
    return wp.nn.MonotoneClassifier.conv((3, size, size), width, 10, grid=4, margin=0.5, rtol=1e-3, on_failure="ignore")


CONTENDERS: dict[str, Make] = {
    "deep OptEq": deep_opteq,
    "monotone, one convolution": monotone,
    "Neural ODE": lambda width, size, channels: NeuralODE(width, 0),
    "augmented Neural ODE": lambda width, size, channels: NeuralODE(width, 5),
}


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def within(budget: int, make: Make, size: int, channels: tuple[int, ...]) -> int:
    """The largest width whose network has at most `budget` parameters."""
    width = 1
    while count(make(width + 1, size, channels)) <= budget:
        width += 1
    return width


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare implicit networks on part of CIFAR-10.")
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--test-images", type=int, default=500)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--size", type=int, default=16)
    parser.add_argument("--parameters", type=int, default=20_000)
    parser.add_argument("--channels", type=int, nargs="+", default=[8, 8, 16, 16, 32], help="of the layers of the deep OptEq")
    parser.add_argument("--only", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_flush_denormal(True)

    X, y, X_test, y_test = load(options)
    print(f"{len(X)} training images of {options.size} x {options.size}, {options.epochs} epochs")
    print("| network | parameters | test accuracy | seconds |")
    print("|---|---|---|---|")
    for name in options.only:
        make, channels = CONTENDERS[name], tuple(options.channels)
        width = within(options.parameters, make, options.size, channels)
        torch.manual_seed(options.seed)
        model = make(width, options.size, channels).to(options.device)
        began = time.perf_counter()
        train(model, X, y, options)
        seconds = time.perf_counter() - began
        print(f"| {name} | {count(model)} | {accuracy(model, X_test, y_test):.1%} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
