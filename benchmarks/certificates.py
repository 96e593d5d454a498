"""At which loss is the plain gradient flow first certified, and what does each sharpening gain?

    python benchmarks/certificates.py [--only NAME] [--seeds N] [--minutes M] [--out FOLDER]

Trains by plain full-batch descent with step 1/lambda_max(K(0)) and keeps the parameters whenever the loss has fallen by a
tenth, until the certificate without sharpenings holds or M minutes of CPU time have passed; then finds for each sharpening
the first kept point that it certifies, by bisection (the point before it is not certified). MNIST is read from
$WELLPOSED_DATA, a folder with mnist.npz or that file itself. A run adds its rows to those of earlier runs in
FOLDER/certificates.json; `certificates_newton.py` adds those of another path.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import wellposed as wp
from wellposed.certify import radius
from wellposed.kernel import tangent_kernel

HERE = Path(__file__).parent
SIZES = {"small": (10, 200, 50), "middle": (50, 500, 100), "large": (100, 1000, 784)}
DIGITS = {"mnist-20": (20, 500), "mnist-100": (100, 1000)}
FAMILIES: dict[str, Callable[..., Any]] = {"GaussianDEQ": wp.GaussianDEQ, "SkipDEQ": wp.SkipDEQ, "MonotoneDEQ": wp.MonotoneDEQ}
COLUMNS: dict[str, tuple[str, ...]] = {"none": (), "active": ("active",), "kernel": ("kernel",), "both": ("active", "kernel")}
#: What the sharpenings do for each family; the other columns would repeat a number.
APPLIES = {"GaussianDEQ": ("none", "both", "active", "kernel"), "SkipDEQ": ("none", "active"), "MonotoneDEQ": ("none",)}
#: How the parameters move, and how the table says it.
PATHS = {"descent": "", "gauss-newton": ", GN"}
#: The loss falls by this factor from one kept point to the next.
FALL = 0.9
#: Points are kept from where the residual is this many times what the certificate without sharpenings needs, roughly.
EARLY = 6.0
#: From here on the certificate without sharpenings is tried.
LATE = 2.0
#: Of the equilibria in training; a certificate solves for its own.
TOLERANCE = 1e-8
#: Step, loss and parameters.
Kept = tuple[int, float, dict[str, Tensor]]


def random_problem(n: int, d: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs on the sphere of radius sqrt(d), standard normal labels."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(n, d, generator=generator, dtype=torch.float64)
    return X * (math.sqrt(d) / X.norm(dim=1, keepdim=True)), torch.randn(n, generator=generator, dtype=torch.float64)


def digits(n: int) -> tuple[Tensor, Tensor]:
    """The first n/2 zeros and ones of MNIST, scaled to norm sqrt(d); labels -1 and 1."""
    place = Path(os.environ["WELLPOSED_DATA"])
    with np.load(place / "mnist.npz" if place.is_dir() else place) as data:
        images, labels = data["x_train"], data["y_train"]
    rows = np.concatenate([np.flatnonzero(labels == digit)[: n // 2] for digit in (0, 1)])
    X = torch.from_numpy(images[rows].reshape(len(rows), -1)).double()
    y = torch.from_numpy(labels[rows].astype(np.float64)) * 2 - 1
    return X * (math.sqrt(X.shape[1]) / X.norm(dim=1, keepdim=True)), y


@dataclass
class Point:
    """Where the training is: equilibria and masked adjoints as good as training needs them."""

    value: Tensor
    adjoint: Tensor


class Trainer:
    """Plain descent with warm starts; keeps parameters along the way."""

    def __init__(self, model: Any, X: Tensor, y: Tensor, step: float) -> None:
        self.model, self.X, self.y, self.step = model, X, y, step
        at = model.linearise(X)
        self._now = self._before = Point(at.value, at.adjoint)
        R = model.recurrent().detach()
        omega = float(torch.linalg.eigvalsh((R + R.T) / 2)[-1])
        self._inverse = 1 / model.margin if isinstance(model, wp.MonotoneDEQ) else 1 / (1 - omega)
        self.kept: list[Kept] = []
        self.steps, self.loss, self.certified = 0, math.inf, False

    def solve(self) -> Point:
        """Picard iterations from the line through the last two points; the solver of the model where they may diverge."""
        model, now, before = self.model, self._now, self._before
        z, p = (2 * new - old for new, old in ((now.value, before.value), (now.adjoint, before.adjoint)))
        if isinstance(model, wp.MonotoneDEQ):
            at = model.linearise(self.X, z0=z, p0=p)
            return Point(at.value, at.adjoint)
        R, C, v = model.recurrent(), model.injection(self.X), model.readout_weight()
        for _ in range(200):
            z, last = torch.relu(torch.addmm(C, z, R.t())), z
            if (z - last).norm() <= TOLERANCE * z.norm():
                break
        mask = torch.addmm(C, z, R.t()) > 0
        for _ in range(200):
            p, last = mask * (v + p @ R), p
            if (p - last).norm() <= TOLERANCE * p.norm():
                break
        return Point(z, p)

    @torch.no_grad()
    def run(self, minutes: float) -> None:
        """Until the certificate without sharpenings holds, or the CPU time is over; then the last point is kept in any case."""
        until, below = time.process_time() + 60 * minutes, math.inf
        while not self.certified:
            at = self.solve()
            self._now, self._before = at, self._now
            r = self.model.readout(at.value, self.model.injection(self.X)) - self.y
            self.loss = float(r.square().sum()) / 2
            if self.loss <= below:
                below = FALL * self.loss
                self._look(at.value)
            if not self.certified and time.process_time() >= until:
                self._keep()
                return
            for name, gradient in self.model.gradients(self.X, at, r).items():
                getattr(self.model, name).sub_(gradient, alpha=self.step)
            self.steps += 1

    def _look(self, Z: Tensor) -> None:
        ratio = math.sqrt(2 * self.loss) / self._needed(Z)
        if ratio <= EARLY:
            self._keep()
        if ratio <= LATE:
            self.certified = radius(self.model, self.X, self.y, sharpen=()).certified

    def _keep(self) -> None:
        state = {name: value.clone() for name, value in self.model.state_dict().items()}
        self.kept.append((self.steps, self.loss, state))

    def _needed(self, Z: Tensor) -> float:
        """About the residual at which the plain certificate holds: s^2 (1 - omega)/(2 sqrt(B^2 + b^2)), not rigorous."""
        model, F, scale = self.model, Z, 1.0
        if isinstance(model, wp.SkipDEQ):
            F, scale = torch.cat([Z, model.injection(self.X)], dim=1), 1 / math.sqrt(model.width)
        elif isinstance(model, wp.MonotoneDEQ):
            scale = 2 + 2 * float(torch.linalg.matrix_norm(model.A)) / math.sqrt(model.width)  # |A| is about twice that
        s, B, b = torch.linalg.svdvals(F)[-1], torch.linalg.matrix_norm(Z, ord=2), torch.linalg.matrix_norm(self.X, ord=2)
        return float(s**2 / (2 * self._inverse * scale * torch.hypot(B, b)))


def first_certified(model: Any, X: Tensor, y: Tensor, kept: list[Kept], sharpen: tuple[str, ...]) -> float | None:
    """The loss of the first kept point that is certified, by bisection; None if the last one is not."""

    def holds(i: int) -> bool:
        model.load_state_dict(kept[i][2])
        return radius(model, X, y, sharpen=sharpen).certified

    if not holds(len(kept) - 1):
        return None
    low, high = -1, len(kept) - 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return kept[high][1]


def run(problem: str, family: str, seed: int, minutes: float) -> Iterator[dict[str, Any]]:
    """The row, again and again as it fills: a run that is cut short keeps what it has measured."""
    if problem in SIZES:
        n, m, d = SIZES[problem]
        X, y = random_problem(n, d, seed)
    else:
        n, m = DIGITS[problem]
        X, y = digits(n)
        d = X.shape[1]
    generator = torch.Generator().manual_seed(1000 + seed)
    model = FAMILIES[family](d, m, generator=generator, dtype=torch.float64, rtol=1e-8)
    step = 1 / float(torch.linalg.eigvalsh(tangent_kernel(model, X))[-1])
    began = time.process_time()
    trainer = Trainer(model, X, y, step)
    trainer.run(minutes)
    row: dict[str, Any] = {"problem": problem, "family": family, "n": n, "m": m, "d": d, "seed": seed, "step_size": step}
    row |= {"steps": trainer.steps, "last_loss": trainer.loss, "kept": len(trainer.kept)}
    row["training_seconds"] = time.process_time() - began
    row["loss"] = {}
    for name in APPLIES[family]:
        row["loss"][name] = first_certified(model, X, y, trainer.kept, COLUMNS[name])
        row["seconds"] = time.process_time() - began
        yield row


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["# Loss at which the plain gradient flow is first certified", ""]
    lines += [
        "Median over the seeds; `python benchmarks/certificates.py` and `certificates_newton.py` measure them. Higher is",
        "earlier. 'not by L': training was cut short at the loss L, where it is not certified. '-' is not measured, an empty",
        "cell has no such sharpening. 'GN' is a path of damped Gauss-Newton steps, the others are those of plain descent. '*':",
        "measured with an earlier form of the theorem, which had |R| for omega and one s for the whole ball; now it is more.",
    ]
    lines += ["", "| problem | (n, m, d) | network | seeds | " + " | ".join(COLUMNS) + " | steps |"]
    lines += ["| --- " * (5 + len(COLUMNS)) + "|"]
    for problem in (*SIZES, *DIGITS):
        for family in FAMILIES:
            for path in PATHS:
                if mine := [row for row in rows if key(row)[:3] == (problem, family, path)]:
                    lines.append(line(mine))
    return "\n".join(lines) + "\n"


def line(mine: list[dict[str, Any]]) -> str:
    """The rows of all seeds as one of the table."""
    first = mine[0]
    cells = [cell(name, mine) if name in APPLIES[first["family"]] else "" for name in COLUMNS]
    size = (first["n"], first["m"], first["d"])
    steps = statistics.median(row["steps"] for row in mine)
    problem = first["problem"] + PATHS[key(first)[2]] + (" *" if any(row.get("earlier_theorem") for row in mine) else "")
    return f"| {problem} | {size} | {first['family']} | {len(mine)} | " + " | ".join(cells) + f" | {steps:.0f} |"


def cell(name: str, mine: list[dict[str, Any]]) -> str:
    if any(name not in row["loss"] for row in mine):
        return "-"
    if any(row["loss"][name] is None for row in mine):
        return f"not by {statistics.median(row['last_loss'] for row in mine):.1e}"
    return f"{statistics.median(row['loss'][name] for row in mine):.1e}"


def key(row: dict[str, Any]) -> tuple[str, str, str, int]:
    """What a row is about; rows without a path are of descent."""
    return row["problem"], row["family"], row.get("path", "descent"), row["seed"]


def rows_in(folder: Path) -> list[dict[str, Any]]:
    """What earlier runs have measured."""
    saved = folder / "certificates.json"
    rows: list[dict[str, Any]] = json.loads(saved.read_text()) if saved.exists() else []
    return rows


def save(row: dict[str, Any], folder: Path) -> None:
    """Adds a row to those of earlier runs, or replaces the one about the same."""
    print(json.dumps(row), flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    rows = [old for old in rows_in(folder) if key(old) != key(row)] + [row]
    (folder / "certificates.json").write_text(json.dumps(rows, indent=1) + "\n")
    (folder / "certificates.md").write_text(table(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    names = [*SIZES, *DIGITS]
    parser.add_argument("--only", action="append", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--family", action="append", choices=list(FAMILIES), metavar="FAMILY", help=", ".join(FAMILIES))
    parser.add_argument("--seeds", type=int, default=1, help="random problems of each kind (MNIST: initializations)")
    parser.add_argument("--minutes", type=float, default=3.0, help="of CPU time of training, for each problem (default: 3)")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of the two files")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for problem in options.only or names:
        for family in options.family or (FAMILIES if problem in SIZES else ["GaussianDEQ"]):
            for seed in range(options.seeds):
                for row in run(problem, family, seed, options.minutes):
                    save(row, options.out)


if __name__ == "__main__":
    main()
