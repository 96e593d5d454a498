"""The convolutional OptEq next to other implicit networks, with equal parameters, images, epochs,
stem and head.

    WELLPOSED_DATA=folder python examples/opteq_contenders.py --images 10000 --epochs 2

Table 1b of Xie et al. (2021), sized for a CPU: a deep OptEq, a monotone network with one
convolution, a Neural ODE and an augmented one (both through torchdiffeq). Widths are the largest
within the parameters of the OptEq. Learning rates are chosen by `--tune` (on part of the training
images) and given by `--lr`. The paper's sizes, for a GPU:

    --channels 16 32 64 64 128 --state-channels 32 --feature-channels 26 --reduce 1
    --images 50000 --test-images 10000 --epochs 200
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from opteq_training import Ledger, accuracy, cifar10, configuration, count, fit, head, parser, stem
from torch import Tensor, nn
from torchdiffeq import odeint_adjoint

import wellposed as wp

#: A network of a width.
Make = Callable[[int, argparse.Namespace], nn.Module]


class Field(nn.Module):
    """dz/dt = conv1(relu(conv3(relu(conv1(z, t))))), the field of Dupont et al. (2019) for
    images."""

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
    """z(1) of dz/dt = field, z(0) the features of the stem with `augmented` channels of zeros."""

    def __init__(self, filters: int, augmented: int, options: argparse.Namespace) -> None:
        super().__init__()
        channels = options.feature_channels + augmented
        self.stem, self.augmented = stem(options.feature_channels, options.reduce), augmented
        self.field, self.head = Field(channels, filters), head(channels)

    def forward(self, X: Tensor) -> Tensor:
        features = self.stem(X)
        z = torch.cat([features, features.new_zeros(len(X), self.augmented, *features.shape[2:])], dim=1)
        ends = torch.tensor([0.0, 1.0], dtype=X.dtype, device=X.device)
        z = odeint_adjoint(self.field, z, ends, rtol=1e-3, atol=1e-3, method="dopri5")[1]
        logits: Tensor = self.head(z)
        return logits


class MonotoneConv(nn.Module):
    """The equilibrium of one monotone convolution of the features of the stem, with margin 0.5."""

    def __init__(self, width: int, options: argparse.Namespace) -> None:
        super().__init__()
        cell = wp.nn.MonotoneConvCell(options.feature_channels, width, margin=0.5)
        solver = wp.solve.PeacemanRachford(wp.solve.TunedStep())
        self.stem, self.head = stem(options.feature_channels, options.reduce), head(width)
        self.layer = wp.nn.EquilibriumLayer(
            cell, solver, wp.ImplicitGradient(solver), on_failure="ignore", rtol=options.rtol, max_steps=500
        )

    def forward(self, X: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layer(self.stem(X)))
        return logits


def deep_opteq(width: int, options: argparse.Namespace) -> nn.Module:
    return wp.convex.ConvOptEq(
        3,
        tuple(options.channels),
        state_channels=options.state_channels,
        feature_channels=options.feature_channels,
        extractor=stem(options.feature_channels, options.reduce),
        head=head(options.state_channels),
        alpha=options.alpha,
        rtol=options.rtol,
        max_steps=500,
        on_failure="ignore",
    )


CONTENDERS: dict[str, Make] = {
    "deep OptEq": deep_opteq,
    "monotone, one convolution": MonotoneConv,
    "Neural ODE": lambda width, options: NeuralODE(width, 0, options),
    "augmented Neural ODE": lambda width, options: NeuralODE(width, 5, options),
}


def within(budget: int, make: Make, options: argparse.Namespace) -> int:
    """The largest width whose network has at most `budget` parameters; any for the deep OptEq,
    which sets the budget."""
    if make is deep_opteq:
        return 0
    width = 1
    while count(make(width + 1, options)) <= budget:
        width += 1
    return width


def main() -> None:
    made = parser("Compare implicit networks on CIFAR-10.")
    made.add_argument("--channels", type=int, nargs="+", default=[4, 8, 16, 16, 32], help="of the layers of the deep OptEq")
    made.add_argument("--state-channels", type=int, default=12)
    made.add_argument("--feature-channels", type=int, default=12)
    made.add_argument("--alpha", type=float, default=0.8)
    made.add_argument("--rtol", type=float, default=1e-3)
    made.add_argument("--lr", type=float, nargs="+", default=[0.01], help="one for all, or with --tune those to try")
    made.add_argument("--only", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    options = made.parse_args()
    torch.set_flush_denormal(True)

    X, y, X_test, y_test = cifar10(options)
    ledger = Ledger(options.out)
    budget = count(deep_opteq(0, options))
    for name in options.only:
        width = within(budget, CONTENDERS[name], options)
        for lr in options.lr:
            key = {"table": "1b", "name": name, "lr": lr, "channels": options.channels, **configuration(options)}
            if ledger.has(**key):
                continue
            torch.manual_seed(options.seed)
            model = CONTENDERS[name](width, options).to(options.device)
            run = fit(model, X, y, nn.functional.cross_entropy, accuracy(X_test, y_test), options, lr=lr)
            known: dict[str, float] = {"parameters": count(model), "width": width}
            if isinstance(model, NeuralODE):
                passes = options.epochs * (-(-len(X) // options.batch) + -(-len(X_test) // 100))
                known["evaluations_per_pass"] = model.field.evaluations / passes
            ledger.add({**key, **known, **run})


if __name__ == "__main__":
    main()
