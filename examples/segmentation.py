"""Trains a multiscale equilibrium that names every pixel, and prints what it reached.

python examples/segmentation.py                  # drawn streets: needs no file
python examples/segmentation.py --data camvid    # photographs, from $WELLPOSED_DATA
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor, nn

import wellposed as wp

NAMES, VOID = ("sky", "road", "tree", "car"), 11  # pixels of the class void do not count


def streets(n: int, generator: torch.Generator, side: int = 32) -> tuple[Tensor, Tensor]:
    """(n, 3, side, side) drawn streets with noise, and the class of every pixel, as in `NAMES`."""
    rows, columns = torch.arange(side)[:, None], torch.arange(side)[None]
    classes = torch.zeros(n, side, side, dtype=torch.long)
    colours = torch.tensor([[0.6, 0.7, 0.9], [0.4, 0.4, 0.4], [0.3, 0.5, 0.2], [0.0, 0.0, 0.0]]).repeat(n, 1, 1)
    colours[:, 3] = torch.rand(n, 3, generator=generator)  # cars have any colour
    for image in classes:
        horizon = int(torch.randint(side // 3, side // 2, (), generator=generator))
        image[horizon:] = 1
        for a in torch.randint(side, (3,), generator=generator):
            image[(rows - horizon).square() + (columns - a).square() < (side // 8) ** 2] = 2
        for a, b in torch.randint(side - side // 4, (2, 2), generator=generator).tolist():
            top = horizon + a * (side - horizon - side // 8) // side
            image[top : top + side // 8, b : b + side // 4] = 3
    images = colours[torch.arange(n)[:, None, None], classes].movedim(3, 1)
    return images + 0.15 * torch.randn(images.shape, generator=generator), classes


def train(model: nn.Module, X: Tensor, y: Tensor, *, steps: int, generator: torch.Generator) -> None:
    """Adam with a cosine, eight images a step."""
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        rows = torch.randint(len(X), (8,), generator=generator)
        loss = nn.functional.cross_entropy(model(X[rows]), y[rows], ignore_index=VOID)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def mean_intersection(predicted: Tensor, y: Tensor, classes: int) -> float:
    """The mean over classes of intersection over union; void pixels do not count."""
    counted = y != VOID
    found = [((predicted == c) & (y == c), ((predicted == c) | (y == c)) & counted) for c in range(classes)]
    return float(torch.stack([both.sum() / either.sum() for both, either in found if either.any()]).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", default="streets", choices=["streets", "camvid"])
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    if options.data == "camvid":
        data = wp.data.load("camvid")
        X, y, X_test, y_test, stride = data.X, data.y.long(), data.X_test, data.y_test.long(), 4
    else:
        (X, y), (X_test, y_test), stride = streets(400, generator), streets(100, generator), 1
    classes = int(y[y != VOID].max()) + 1
    model = wp.nn.MultiscaleDEQ.segmenter(3, (16, 16), classes, stride=stride, groups=1, generator=generator, rtol=1e-2)
    begin = time.process_time()
    train(model, X, y, steps=options.steps, generator=generator)
    print(f"{options.steps} steps in {time.process_time() - begin:.0f} s of processor time")
    with torch.no_grad():
        predicted = torch.cat([model.eval()(part).argmax(1) for part in X_test.split(16)])
    print(f"test images: {(predicted == y_test)[y_test != VOID].float().mean():.1%} of the pixels are right")
    print(f"mean intersection over union {mean_intersection(predicted, y_test, classes):.3f}")
    print(f"{model.layer.last_solution.converged.float().mean():.0%} of the last equilibria converged")


if __name__ == "__main__":
    main()
