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
from torch import Tensor

import wellposed as wp
from wellposed.data.restoration import NOISE, blur


def psnr(output: Tensor, image: Tensor) -> Tensor:
    """(batch,) the peak signal-to-noise ratio in dB, of images in [0, 1]."""
    return -10 * torch.log10((output - image).square().flatten(1).mean(1))


def rate(progress: float, highest: float) -> float:
    """The step size after a part of the training: up in the first 10 %, then down, by cosines."""
    part = (0.1 - progress) / 0.1 if progress < 0.1 else (progress - 0.1) / 0.9
    return highest * (0.01 + 0.99 * (1 + math.cos(math.pi * part)) / 2)


def some(images: Tensor, generator: torch.Generator) -> Tensor:
    """Four images, turned and reflected; half of the time a part of them, enlarged."""
    x = images[torch.randint(len(images), (4,), generator=generator)]
    turns, mirror, enlarge, top, left = torch.randint(24, (5,), generator=generator).tolist()
    x = x.rot90(turns % 4, (2, 3)).flip(3) if mirror % 2 else x.rot90(turns % 4, (2, 3))
    if enlarge % 2:
        (h, w), part = x.shape[2:], x[:, :, top : top + x.shape[2] * 5 // 8, left : left + x.shape[3] * 5 // 8]
        x = torch.nn.functional.interpolate(part, (h, w), mode="bicubic", align_corners=False).clamp(0, 1)
    return x


def train(model: wp.imaging.Reconstructor, images: Tensor, *, before: int, steps: int, seed: int = 0) -> None:
    """Adam: first the free network alone, whose image p is a restored one; then the equilibrium."""
    cell, generator = model.layer.cell, torch.Generator().manual_seed(seed)
    accurate, model.layer.rtol = model.layer.rtol, 3e-3  # training does not need more
    free = lambda y: cell.network.condition(cell.operator, y)[1]  # noqa: E731
    for restore, number, highest in ((free, before, 5e-3), (model, steps, 3e-3)):
        optimizer = torch.optim.Adam(model.parameters())
        for i in range(number):
            optimizer.param_groups[0]["lr"] = rate(i / number, highest)
            x = some(images, generator)
            y = blur(x) + NOISE * torch.randn(x.shape, generator=generator)  # new noise every time
            loss = (restore(y) - x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    model.layer.rtol = accurate


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", default="deblurring_leaves", choices=["deblurring_leaves", "deblurring"])
    parser.add_argument("--steps", type=int, default=800, help="of the equilibrium; the free network makes twice as many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", metavar="FOLDER", help="where to write the weights")
    options = parser.parse_args()
    data = wp.data.load(options.data)
    model = wp.tasks.deblurrer(generator=torch.Generator().manual_seed(options.seed))
    begin = time.process_time()
    train(model, data.y, before=2 * options.steps, steps=options.steps, seed=options.seed)
    print(f"{options.steps} steps in {time.process_time() - begin:.1f} s of processor time")
    with torch.no_grad():
        before, after = (float(psnr(x, data.y_test).mean()) for x in (data.X_test, model.eval()(data.X_test)))
    distance = float(model.error_bound(data.X_test).max()) / math.sqrt(data.X_test[0].numel())
    print(f"test images: blurred {before:.2f} dB, restored {after:.2f} dB")
    print(f"contraction {model.layer.cell.contraction:.4f}: within {distance:.1e} of the equilibria (root mean square)")
    if options.save:
        terms = {"deblurring_leaves": "MIT", "deblurring": "of natural64: non-commercial research"}
        card = {"data": options.data, "license": terms[options.data], "steps": options.steps}
        card |= {"blurred_psnr": before, "test_psnr": after}
        print(wp.tasks.save(model, "deblurring", options.save, card=card))


if __name__ == "__main__":
    main()
