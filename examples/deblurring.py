"""Trains an equilibrium to remove blur and noise from images, and prints what it reached.

    python examples/deblurring.py                      # drawn images of discs: needs no file
    python examples/deblurring.py --data deblurring    # photographs, from $WELLPOSED_DATA

The cell contracts for all weights, so each image has exactly one reconstruction. `--save FOLDER`
writes the weights for `wp.tasks.load("deblurring", FOLDER)`.
"""

from __future__ import annotations

import argparse
import math
import time

import torch
from torch import Tensor, nn

import wellposed as wp
from wellposed.data.restoration import NOISE, blur


def psnr(output: Tensor, image: Tensor) -> Tensor:
    """(batch,) the peak signal-to-noise ratio in dB, of images in [0, 1]."""
    return -10 * torch.log10((output - image).square().flatten(1).mean(1))


def rate(progress: float, highest: float = 3e-3) -> float:
    """The step size after a part of the training: up in the first 10 %, then down, by cosines."""
    part = (0.1 - progress) / 0.1 if progress < 0.1 else (progress - 0.1) / 0.9
    return highest * (0.01 + 0.99 * (1 + math.cos(math.pi * part)) / 2)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, generator: torch.Generator) -> float:
    """One step with 8 turned images and new noise; the mean squared error."""
    x = images[torch.randint(len(images), (8,), generator=generator)]
    x = x.rot90(int(torch.randint(4, (), generator=generator)), (2, 3))
    y = blur(x) + NOISE * torch.randn(x.shape, generator=generator)
    loss = (model(y) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def train(model: nn.Module, images: Tensor, *, steps: int, seed: int = 0) -> list[float]:
    """Adam; returns the losses."""
    optimizer, generator, losses = torch.optim.Adam(model.parameters()), torch.Generator().manual_seed(seed), []
    for i in range(steps):
        optimizer.param_groups[0]["lr"] = rate(i / steps)
        losses.append(step(model, optimizer, images, generator))
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", default="deblurring_leaves", choices=["deblurring_leaves", "deblurring"])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", metavar="FOLDER", help="where to write the weights")
    options = parser.parse_args()
    data = wp.data.load(options.data)
    model = wp.tasks.deblurrer(generator=torch.Generator().manual_seed(options.seed))
    begin = time.process_time()
    train(model, data.y, steps=options.steps, seed=options.seed)
    print(f"{options.steps} steps in {time.process_time() - begin:.1f} s of processor time")
    with torch.no_grad():
        before, after = (float(psnr(x, data.y_test).mean()) for x in (data.X_test, model.eval()(data.X_test)))
    factor = model.layer.cell.contraction
    distance = float(model.layer.last_solution.error_bound(factor).max()) / math.sqrt(data.X_test[0].numel())
    print(f"test images: blurred {before:.2f} dB, restored {after:.2f} dB; the cell contracts by {factor:.4f}, so every image")
    print(f"is within {distance:.1e} of its equilibrium (root mean square of the pixels)")
    if options.save:
        free = options.data == "deblurring_leaves"
        card = {"data": options.data, "license": "MIT" if free else "of natural64: non-commercial research"}
        card |= {"steps": options.steps, "blurred_psnr": before, "test_psnr": after}
        print(wp.tasks.save(model, "deblurring", options.save, card=card))


if __name__ == "__main__":
    main()
