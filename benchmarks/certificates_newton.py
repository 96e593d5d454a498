"""Loss at which the plain flow is first certified, along damped Gauss-Newton training.

    python benchmarks/certificates_newton.py [--problem NAME] [--family FAMILY] [--sharpen COLUMN] [--end LOSS] [--out FOLDER]

Where gradient descent needs too long to reach small losses (100 images of MNIST, `MonotoneDEQ` with many units), steps of
-1/4 J^T K^-1 r get there in a minute: the certificate asks only where the parameters are, not how they came there. Adds to
the rows of `certificates.py`. Needs mnist.npz in $WELLPOSED_DATA for the images.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import wellposed as wp
from certificates import (
    APPLIES,
    COLUMNS,
    DIGITS,
    FAMILIES,
    HERE,
    SIZES,
    Kept,
    digits,
    first_certified,
    key,
    random_problem,
    rows_in,
    save,
)

DAMPING = 0.25


def load(problem: str, family: str) -> tuple[Any, Tensor, Tensor]:
    """The model at its start, and the data."""
    seed = 1000
    if problem in SIZES:
        n, m, d = SIZES[problem]
        X, y = random_problem(n, d, 0)
    elif problem == "mnist-20":
        n, m = DIGITS[problem]
        X, y = digits(n)
    else:  # images drawn at random, not the first ones: so since the first record of this path
        n, m = DIGITS[problem]
        X, y = wp.data.load("mnist", n=n, classes=(0, 1), paper="ling2022", dtype=torch.float64)
        seed = 0
    model = FAMILIES[family](X.shape[1], m, generator=torch.Generator().manual_seed(seed), dtype=torch.float64, rtol=1e-10)
    return model, X, y


def path(model: Any, X: Tensor, y: Tensor, end: float) -> list[Kept]:
    """Losses and parameters until the loss is below `end`."""
    points: list[Kept] = []
    at = None
    while True:
        at = model.linearise(X) if at is None else model.linearise(X, z0=at.value, p0=at.adjoint)
        with torch.no_grad():
            r = model.readout(at.value, model.injection(X)) - y
        loss = float(r.square().sum()) / 2
        points.append((len(points), loss, {name: value.clone() for name, value in model.state_dict().items()}))
        print(f"step {len(points) - 1}: loss {loss:.3e}", flush=True)
        if loss < end:
            return points
        steps = model.gradients(X, at, torch.linalg.solve(wp.tangent_kernel(model, X), r))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter -= DAMPING * steps[name]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [*SIZES, *DIGITS]
    parser.add_argument("--problem", default="mnist-100", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--family", default="GaussianDEQ", choices=list(FAMILIES), metavar="FAMILY", help=", ".join(FAMILIES))
    parser.add_argument("--sharpen", action="append", choices=list(COLUMNS), metavar="COLUMN", help=", ".join(COLUMNS))
    parser.add_argument("--end", type=float, default=1e-8, help="the loss at which the path ends (default: 1e-8)")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of the two files")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, X, y = load(options.problem, options.family)
    began = time.process_time()
    points = path(model, X, y, options.end)
    row: dict[str, Any] = {"problem": options.problem, "family": options.family, "path": "gauss-newton", "seed": 0}
    row |= {"n": X.shape[0], "m": model.width, "d": X.shape[1], "steps": points[-1][0], "last_loss": points[-1][1]}
    row |= {"kept": len(points), "training_seconds": time.process_time() - began}
    # what an earlier run has measured on the same path stays
    row["loss"] = next((dict(old["loss"]) for old in rows_in(options.out) if key(old) == key(row)), {})
    for name in options.sharpen or APPLIES[options.family]:
        row["loss"][name] = first_certified(model, X, y, points, COLUMNS[name])
        row["seconds"] = time.process_time() - began
        save(row, options.out)


if __name__ == "__main__":
    main()
