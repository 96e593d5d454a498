"""Segmentation of road scenes: a deep OptEq as backbone, next to a fully convolutional network of
the same size.

    WELLPOSED_DATA=folder python examples/opteq_camvid.py --images 367 --epochs 6

Table 2 of Xie et al. (2021), on CamVid instead of Cityscapes and sized for a CPU. Three weighted
layers as there; the paper's channels are `--channels 256 512 512 --state-channels 256`, for who has
a GPU (`--device cuda`).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from opteq_training import Evaluate, Ledger, Solves, configuration, count, fit, parser, standardized
from torch import Tensor, nn

import wellposed as wp

CLASSES, VOID = 11, 11


def extractor(channels: int) -> nn.Module:
    """Images to features at a quarter of the resolution."""
    return nn.Sequential(
        nn.Conv2d(3, channels, 3, stride=2, padding=1),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.Conv2d(channels, channels, 3, stride=2, padding=1),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
    )


def head(channels: int) -> nn.Module:
    """A class for every pixel, at full resolution again."""
    return nn.Sequential(
        nn.BatchNorm2d(channels),
        nn.Conv2d(channels, CLASSES, 1),
        nn.Upsample(scale_factor=4, mode="bilinear", align_corners=False),
    )


def opteq(options: argparse.Namespace) -> nn.Module:
    return wp.convex.ConvOptEq(
        3,
        tuple(options.channels),
        state_channels=options.state_channels,
        feature_channels=options.state_channels,
        extractor=extractor(options.state_channels),
        head=head(options.state_channels),
        alpha=0.8,
        rtol=1e-3,
        max_steps=500,
        on_failure="ignore",
        generator=torch.Generator().manual_seed(options.seed),
    )


def fcn(options: argparse.Namespace) -> nn.Module:
    """Three 3x3 convolutions between the same extractor and head, as wide as the parameters of the
    OptEq allow."""

    def make(width: int) -> nn.Module:
        c, layers = options.state_channels, []
        for a, b in ((c, width), (width, width), (width, c)):
            layers += [nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU()]
        return nn.Sequential(extractor(c), *layers, head(c))

    width, budget = 1, count(opteq(options))
    while count(make(width + 1)) <= budget:
        width += 1
    torch.manual_seed(options.seed)
    return make(width)


NETWORKS: dict[str, Callable[[argparse.Namespace], nn.Module]] = {"deep OptEq": opteq, "FCN": fcn}


def loss(logits: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits, y, ignore_index=VOID)


def scores(X: Tensor, y: Tensor) -> Evaluate:
    """Mean intersection over union, mean accuracy of the classes that occur, accuracy of all
    pixels."""

    def evaluate(model: nn.Module) -> dict[str, float]:
        confusion, solved = torch.zeros(CLASSES, CLASSES, dtype=torch.float64), Solves(model)
        for i in range(0, len(X), 8):
            guess, truth = model(X[i : i + 8]).argmax(dim=1).flatten().cpu(), y[i : i + 8].flatten().cpu()
            solved.note()
            valid = truth != VOID
            pairs = torch.bincount(truth[valid] * CLASSES + guess[valid], minlength=CLASSES**2)
            confusion += pairs.reshape(CLASSES, CLASSES)
        right, truth, guess = confusion.diagonal(), confusion.sum(dim=1), confusion.sum(dim=0)
        seen = truth > 0
        union = (right / (truth + guess - right))[seen].mean()
        found = {"mIoU": float(union), "mAcc": float((right / truth)[seen].mean()), "aAcc": float(right.sum() / truth.sum())}
        return found | {f"test_{name}": value for name, value in solved.summary().items()}

    return evaluate


def main() -> None:
    made = parser(
        "Segment CamVid with a deep OptEq and with an FCN of the same size.", images=367, test_images=233, epochs=6, batch=8
    )
    made.add_argument("--channels", type=int, nargs="+", default=[16, 32, 32])
    made.add_argument("--state-channels", type=int, default=16)
    made.add_argument("--lr", type=float, nargs="+", default=[0.01], help="one, or with --tune those to try")
    made.add_argument("--only", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    options = made.parse_args()
    torch.set_flush_denormal(True)

    data = wp.data.load("camvid", options.images, n_test=options.test_images, flatten=False, seed=options.seed)
    X, y, X_test, y_test = standardized(data, options.device)
    if options.tune:
        held = len(X) // 5
        X, y, X_test, y_test = X[held:], y[held:], X[:held], y[:held]
    ledger = Ledger(options.out)
    for name in options.only:
        for lr in options.lr:
            key = {"table": "2", "name": name, "lr": lr, "channels": options.channels, **configuration(options)}
            if ledger.has(**key):
                continue
            torch.manual_seed(options.seed)
            model = NETWORKS[name](options).to(options.device)
            run = fit(model, X, y, loss, scores(X_test, y_test), options, lr=lr)
            ledger.add({**key, "parameters": count(model), **run})


if __name__ == "__main__":
    main()
