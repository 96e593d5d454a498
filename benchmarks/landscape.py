"""CPU time of a loss surface of ResidualDEQ, warm-started and checked, against evaluating each point cold.

    python benchmarks/landscape.py            # 51 x 51 points, 1000 images; cold on every third row, every tenth column
    python benchmarks/landscape.py --quick    # seconds: to see that it runs; writes nothing

Warm is `landscape.surface(probes=32)`: starts from where the neighbours point to, and at every point 32 samples are solved once
more from a random start; all of that counts. (The default checks all samples, which costs another cold solve.) Cold is
`surface(warm_start=False, num_starts=0)`: every point from zero, nothing checked. Both have the same solver, tolerance and
batch. CPU time of one thread (`process_time`), the time a point is compared; half of the cold points are timed before the warm
surface and half after it, because a shared machine drifts.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import wellposed as wp
from wellposed.landscape import filter_normalized, random_direction, surface

RESULTS = Path(__file__).parent / "results"
SOLVERS = {"Auto()": wp.Auto(), "Anderson(memory=3)": wp.Anderson(memory=3)}
PROBES = 32
loss = nn.functional.cross_entropy


def data(n: int) -> tuple[Tensor, Tensor]:
    """scikit-learn's digits, 8 x 8."""
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images[:n] / 16.0, dtype=torch.float32).reshape(-1, 1, 8, 8), torch.tensor(labels[:n])


def trained(X: Tensor, y: Tensor, options: argparse.Namespace) -> wp.nn.ResidualDEQ:
    """A model trained with the Jacobian penalty, and with a large gain on its input: both keep its equilibria."""
    generator = torch.Generator().manual_seed(0)
    solve: dict[str, Any] = {"rtol": options.rtol, "max_steps": 100, "on_failure": "ignore"}
    model = wp.nn.ResidualDEQ(
        1, options.channels, 10, grid=2, input_gain=1.0, solver=wp.Anderson(memory=3), generator=generator, **solve
    )
    with torch.no_grad():
        model.cell.norm2.weight.fill_(3.0)
    fast = [*model.encoder.parameters(), *model.head.parameters()]
    optimizer = torch.optim.Adam([{"params": list(model.cell.parameters()), "lr": 3e-4}, {"params": fast, "lr": 1e-2}])
    steps = options.epochs * math.ceil(len(X) / 50)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(steps, 1))
    for _ in range(options.epochs):
        for rows in torch.randperm(len(X), generator=generator).split(50):
            prediction, penalty = model.penalized(X[rows], generator=generator)
            optimizer.zero_grad()
            (loss(prediction, y[rows]) + 4.0 * penalty).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    model.layer.solver = SOLVERS[options.solver]
    return model


def cold_row(model: nn.Module, X: Tensor, y: Tensor, directions: Any, a: float, num: int, radius: float) -> tuple[Any, float]:
    """A line of the grid, at `num` of its columns, each point from zero; and the seconds a point."""
    base = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for name, p in model.named_parameters():
            p += a * directions[0][name]
    began = time.process_time()
    line = surface(model, loss, X, y, directions=directions[1:], num=num, radius=radius, warm_start=False, num_starts=0)
    seconds = (time.process_time() - began) / num
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(base[name])
    return line, seconds


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds a point, warm and cold, and how well the losses agree."""
    X, y = data(options.images)
    model = trained(X, y, options)
    with torch.no_grad():
        accuracy = float((model(X).argmax(dim=1) == y).double().mean())
    generator = torch.Generator().manual_seed(1)
    directions = [filter_normalized(model, random_direction(model, generator=generator)) for _ in range(2)]
    shape = (options.rows, options.num)
    spacing = 2 * options.radius / (options.num - 1)
    radii = (spacing * (options.rows - 1) / 2, options.radius)  # the spacing of the full grid, also with fewer rows
    axis = np.linspace(-radii[0], radii[0], options.rows)
    chosen = list(range(0, options.rows, options.cold_rows))
    columns = np.arange(0, options.num, options.cold_columns)
    cold: dict[int, Any] = {}

    def time_cold(rows: list[int]) -> None:
        for i in rows:
            cold[i] = cold_row(model, X, y, directions, float(axis[i]), len(columns), options.radius)

    time_cold(chosen[::2])
    began = time.process_time()
    warm = surface(model, loss, X, y, directions=directions, num=shape, radius=radii, probes=PROBES, progress=not options.quick)
    warm_seconds = time.process_time() - began
    time_cold(chosen[1::2])

    lines = np.stack([cold[i][0].values for i in chosen])
    twins = warm.values[np.ix_(chosen, columns)]
    both = np.isfinite(lines) & np.isfinite(twins)
    each = [cold[i][1] for i in chosen]
    return {
        "network": f"ResidualDEQ, {options.channels} channels, 8 x 8 digits, trained {options.epochs} epochs",
        "accuracy_on_the_images": accuracy,
        "solver": options.solver,
        "rtol": options.rtol,
        "images": options.images,
        "points": int(warm.values.size),
        "shape": list(shape),
        "radius": options.radius,
        "status": warm.counts(),
        "loss_range": [float(np.nanmin(warm.values)), float(np.nanmax(warm.values))],
        "warm_cpu_seconds": warm_seconds,
        "warm_cpu_seconds_a_point": warm_seconds / warm.values.size,
        "cold_points": int(lines.size),
        "cold_cpu_seconds_a_point": float(np.mean(each)),
        "cold_cpu_seconds_a_point_of_rows": [min(each), max(each)],
        "ratio": float(np.mean(each)) / (warm_seconds / warm.values.size),
        "warm_evaluations": float(np.nanmean(warm.num_steps)),
        "cold_evaluations": float(np.nanmean(np.stack([cold[i][0].num_steps for i in chosen]))),
        "compared_points": int(both.sum()),
        "largest_difference_of_losses": float(np.abs(lines - twins)[both].max(initial=0.0)),
    }


def write(record: dict[str, Any]) -> None:
    """Adds the record to benchmarks/results/landscape.json, in the place of one of the same setting, and writes the page."""
    file = RESULTS / "landscape.json"
    setting = ("network", "solver", "rtol", "images", "shape", "radius")
    old = json.loads(file.read_text()) if file.exists() else []
    records = [one for one in old if any(one[name] != record[name] for name in setting)] + [record]
    file.write_text(json.dumps(records, indent=2) + "\n")
    (RESULTS / "landscape.md").write_text(page(records))


def page(records: list[dict[str, Any]]) -> str:
    """The table."""
    text = ["# A loss surface, warm against cold", ""]
    text += [line.strip() for line in (__doc__ or "").split("\n\n")[2].splitlines()]
    text += [
        "",
        "| network | solver | grid | radius | warm, CPU ms a point | cold | ratio | evaluations | status |",
        "|" + " --- |" * 9,
    ]
    for one in records:
        text.append(
            f"| {one['network']}, {one['images']} images, rtol {one['rtol']:g} | {one['solver']} | "
            f"{one['shape'][0]} x {one['shape'][1]} | {one['radius']} | {1e3 * one['warm_cpu_seconds_a_point']:.0f} | "
            f"{1e3 * one['cold_cpu_seconds_a_point']:.0f} ({one['cold_points']} points) | {one['ratio']:.2f} | "
            f"{one['warm_evaluations']:.2f} to {one['cold_evaluations']:.2f} | {one['status']} |"
        )
    worst = max(one["largest_difference_of_losses"] for one in records)
    text += ["", f"The largest difference of a warm and a cold loss was {worst:.2g}.", ""]
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(description="A loss surface of ResidualDEQ, warm against cold.")
    parser.add_argument("--num", type=int, default=51, help="points in a row")
    parser.add_argument("--rows", type=int, default=None, help="only so many rows, about the centre, of the same spacing")
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--channels", type=int, default=16)
    parser.add_argument("--radius", type=float, default=0.25)
    parser.add_argument("--rtol", type=float, default=1e-3)
    parser.add_argument("--solver", choices=sorted(SOLVERS), default="Auto()", help="Auto() is the default of the library")
    parser.add_argument("--epochs", type=int, default=7)
    parser.add_argument("--cold-rows", type=int, default=3, help="time cold one row in so many")
    parser.add_argument("--cold-columns", type=int, default=10, help="and one column in so many; divides num - 1")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.quick:
        options.num, options.images, options.channels, options.epochs, options.cold_columns = 9, 40, 8, 2, 4
        options.radius *= 8 / 50  # the spacing of the full grid
    if (options.num - 1) % options.cold_columns:
        parser.error(f"--cold-columns must divide {options.num - 1}.")
    options.rows = options.num if options.rows is None else options.rows
    record = measure(options)
    print(json.dumps(record, indent=2))
    if not options.quick:
        write(record)


if __name__ == "__main__":
    main()
