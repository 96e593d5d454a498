"""Time of a loss surface of ResidualDEQ, warm-started and checked against evaluating each point cold.

    python benchmarks/landscape.py            # 51 x 51 points, 1000 images; cold is timed on a sample of the points
    python benchmarks/landscape.py --quick    # seconds: to see that it runs

Warm is what `landscape.surface` does: starts from the neighbour, and at every point `--probes` samples are solved once more
from a random start. Cold solves every point from zero and checks nothing. Both are held to the same tolerance; the largest
difference of their losses is printed. One thread. Cold points are timed one row of the grid in so many, whole rows, and the
time a point is compared.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import wellposed as wp
from wellposed.landscape import filter_normalized, random_direction, surface

loss = nn.functional.cross_entropy


def data(n: int) -> tuple[Tensor, Tensor]:
    """scikit-learn's digits, 8 x 8."""
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images[:n] / 16.0, dtype=torch.float32).reshape(-1, 1, 8, 8), torch.tensor(labels[:n])


def trained(X: Tensor, y: Tensor, steps: int, channels: int) -> wp.nn.ResidualDEQ:
    """A model after some steps of Adam with the Jacobian penalty that keeps its equilibria."""
    generator = torch.Generator().manual_seed(0)
    model = wp.nn.ResidualDEQ(
        1, channels, 10, solver=wp.Anderson(memory=3), rtol=1e-3, max_steps=60, on_failure="ignore", generator=generator
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(steps):
        rows = torch.randint(len(X), (min(64, len(X)),), generator=generator)
        prediction, penalty = model.penalized(X[rows], generator=generator)
        optimizer.zero_grad()
        (loss(prediction, y[rows]) + 2.0 * penalty).backward()
        optimizer.step()
    return model


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds a point, warm and cold, and how well the losses agree."""
    X, y = data(options.images)
    model = trained(X, y, options.train_steps, options.channels)
    generator = torch.Generator().manual_seed(1)
    directions = [filter_normalized(model, random_direction(model, generator=generator)) for _ in range(2)]
    common = {"directions": directions, "radius": options.radius}
    start = time.perf_counter()
    warm = surface(model, loss, X, y, num=options.num, probes=options.probes, progress=not options.quick, **common)
    warm_seconds = (time.perf_counter() - start) / warm.values.size
    cold_seconds, differences, cold_steps = [], [], []
    for i in range(0, options.num, options.cold_every):
        a = float(warm.coordinates[0][i])
        row = [{name: d for name, d in directions[1].items()}]
        base = {name: p.detach().clone() for name, p in model.named_parameters()}
        with torch.no_grad():
            for name, p in model.named_parameters():
                p += a * directions[0][name]
        start = time.perf_counter()
        cold = surface(
            model, loss, X, y, directions=row, num=options.num, radius=options.radius, warm_start=False, num_starts=0
        )
        cold_seconds.append((time.perf_counter() - start) / options.num)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(base[name])
        both = np.isfinite(cold.values) & np.isfinite(warm.values[i])
        differences.append(np.abs(cold.values - warm.values[i])[both].max(initial=0.0))
        cold_steps.append(np.nanmean(cold.num_steps))
    return {
        "points": int(warm.values.size),
        "images": options.images,
        "radius": options.radius,
        "probes": options.probes,
        "status": warm.counts(),
        "warm_seconds_a_point": warm_seconds,
        "cold_seconds_a_point": float(np.mean(cold_seconds)),
        "ratio": float(np.mean(cold_seconds)) / warm_seconds,
        "warm_evaluations": float(np.nanmean(warm.num_steps)),
        "cold_evaluations": float(np.mean(cold_steps)),
        "largest_difference_of_losses": float(np.max(differences)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="A loss surface of ResidualDEQ, warm against cold.")
    parser.add_argument("--num", type=int, default=51)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--channels", type=int, default=48)
    parser.add_argument("--radius", type=float, default=0.5)
    parser.add_argument("--probes", type=int, default=32)
    parser.add_argument("--train-steps", type=int, default=40)
    parser.add_argument("--cold-every", type=int, default=10, help="time cold one row in so many")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.quick:
        options.num, options.images, options.channels, options.train_steps, options.cold_every = 9, 40, 8, 5, 8
        options.radius, options.probes = options.radius * 8 / 50, 2  # the spacing of the full grid
    print(json.dumps(measure(options), indent=2))


if __name__ == "__main__":
    main()
