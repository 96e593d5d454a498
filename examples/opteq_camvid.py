"""Segmentation of road scenes: a deep OptEq as backbone, next to a fully convolutional network of the same size.

    WELLPOSED_DATA=folder python examples/opteq_camvid.py --images 60 --epochs 2

A small version of Table 2 of Xie et al. (2021), on CamVid instead of Cityscapes and sized for a CPU. Three weighted layers as
there; the paper's channels are `--channels 256 512 512 --state-channels 256`, for who has a GPU (`--device cuda`).
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor, nn

import wellposed as wp

CLASSES, VOID = 11, 11


def extractor(channels: int) -> nn.Module:
    """Images to features at a quarter of the resolution."""
    return nn.Sequential(
        nn.Conv2d(3, channels, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(channels, channels, 3, stride=2, padding=1),
        nn.ReLU(),
    )


def head(channels: int) -> nn.Module:
    """A class for every pixel, at full resolution again."""
    return nn.Sequential(nn.Conv2d(channels, CLASSES, 1), nn.Upsample(scale_factor=4, mode="bilinear", align_corners=False))


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
        on_failure="ignore",
        generator=torch.Generator().manual_seed(options.seed),
    )


def fcn(options: argparse.Namespace, parameters: int) -> nn.Module:
    """Three 3x3 convolutions between the same extractor and head, as wide as the parameters allow."""

    def make(width: int) -> nn.Module:
        c, layers = options.state_channels, []
        for a, b in ((c, width), (width, width), (width, c)):
            layers += [nn.Conv2d(a, b, 3, padding=1), nn.ReLU()]
        return nn.Sequential(extractor(c), *layers, head(c))

    width = 1
    while count(make(width + 1)) <= parameters:
        width += 1
    return make(width)


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def train(model: nn.Module, X: Tensor, y: Tensor, options: argparse.Namespace) -> None:
    """SGD with momentum and the polynomial schedule of the paper, minibatches of 8."""
    batches = options.epochs * -(-len(X) // 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.PolynomialLR(optimizer, batches, power=0.9)
    generator = torch.Generator().manual_seed(options.seed)
    for _ in range(options.epochs):
        for rows in torch.randperm(len(X), generator=generator).split(8):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(X[rows]), y[rows], ignore_index=VOID).backward()
            optimizer.step()
            schedule.step()


@torch.no_grad()
def scores(model: nn.Module, X: Tensor, y: Tensor) -> tuple[float, float, float]:
    """Mean intersection over union, mean accuracy of the classes that occur, accuracy of all pixels."""
    confusion = torch.zeros(CLASSES, CLASSES)
    for i in range(0, len(X), 8):
        guess, truth = model(X[i : i + 8]).argmax(dim=1).flatten().cpu(), y[i : i + 8].flatten().cpu()
        valid = truth != VOID
        confusion += torch.bincount(truth[valid] * CLASSES + guess[valid], minlength=CLASSES**2).reshape(CLASSES, CLASSES)
    right, truth, guess = confusion.diagonal(), confusion.sum(dim=1), confusion.sum(dim=0)
    seen = truth > 0
    union = (right / (truth + guess - right))[seen].mean()
    return float(union), float((right / truth)[seen].mean()), float(right.sum() / truth.sum())


def main() -> None:
    parser = argparse.ArgumentParser(description="Segment CamVid with a deep OptEq and with an FCN of the same size.")
    parser.add_argument("--images", type=int, default=60)
    parser.add_argument("--test-images", type=int, default=40)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--channels", type=int, nargs="+", default=[16, 32, 32])
    parser.add_argument("--state-channels", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_flush_denormal(True)

    data = wp.data.load("camvid", options.images, n_test=options.test_images, flatten=False, seed=options.seed)
    mean, spread = data.X.mean(dim=(0, 2, 3), keepdim=True), data.X.std(dim=(0, 2, 3), keepdim=True)
    X, X_test = (((images - mean) / spread).to(options.device) for images in (data.X, data.X_test))
    y, y_test = (labels.long().to(options.device) for labels in (data.y, data.y_test))
    print(f"{len(X)} training scenes of {X.shape[2]} x {X.shape[3]}, {options.epochs} epochs")
    print("| network | parameters | mIoU | mAcc | aAcc | seconds |")
    print("|---|---|---|---|---|---|")
    torch.manual_seed(options.seed)
    ours = opteq(options)
    for name, model in (("deep OptEq", ours), ("FCN", fcn(options, count(ours)))):
        model = model.to(options.device)
        began = time.perf_counter()
        train(model, X, y, options)
        seconds = time.perf_counter() - began
        result = " | ".join(f"{100 * score:.1f}" for score in scores(model, X_test, y_test))
        print(f"| {name} | {count(model)} | {result} | {seconds:.0f} |", flush=True)


if __name__ == "__main__":
    main()
