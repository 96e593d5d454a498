"""Measure where the weights of the package end, and what the page of imaging says beside its table.

    python benchmarks/task_limits.py [--parts distant staying bounds imaging]

Chains longer than trained on, mazes iterated after they converged, bounds of the error at small tolerances; and, with the
photographs of $WELLPOSED_DATA, the PSNR of the data and a short training with and without its first part. Writes
benchmarks/results/task_limits.json, from which `make tables` copies into docs/tasks. Takes about five minutes.
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import torch

import task_imaging
import wellposed as wp
from task_reasoning import puzzles

RESULTS = Path(__file__).parent / "results" / "task_limits.json"
#: Nodes of the chains, and how many of them there are.
LENGTH, CHAINS = 400, 20
TOLERANCES = {"1e-5 (default)": 1e-5, "1e-8": 1e-8, "1e-14": 1e-14}
#: Sizes of mazes, and the iterations after the last of them converged or was given up.
SIZES, AFTER = (9, 13), 400
#: Images whose errors are measured, and at which tolerances.
IMAGES, SMALL = 20, (1e-3, 1e-5, 1e-6, 1e-7)
#: Steps of both parts of two short trainings: 40 s each by the milliseconds of a step in imaging.json.
TRIALS = ((1240, 445), (0, 810))


@torch.no_grad()
def distant() -> list[dict[str, Any]]:
    """Accuracy on long chains by tolerance, in float64; the last row is the reference of the differences."""
    data = wp.data.load("chains", n=1, n_test=CHAINS, size=LENGTH, seed=0, dtype=torch.float64)
    model: Any = wp.tasks.load("chains").double()
    found, all_logits = [], []
    for name, rtol in TOLERANCES.items():
        model.layer.rtol = rtol
        logits = model(data.X_test)
        solution = model.layer.last_solution
        right = logits.argmax(1) == data.y_test
        zero = (solution.value.reshape(CHAINS, LENGTH, -1) == 0).all(2).sum(1)
        all_logits.append(logits)
        found.append(
            {
                "rtol": name,
                "converged": f"{int(solution.converged.sum())} of {CHAINS}",
                "evaluations": int(solution.num_steps.max()),
                "accuracy": f"{100 * float(right.double().mean()):.1f}",
                "last": f"{100 * float(right[:, -1].double().mean()):.0f}",
                "zero": f"{int(zero.min())} to {int(zero.max())}",
            }
        )
    for row, logits in zip(found, all_logits, strict=True):
        row["difference"] = f"{float((logits - all_logits[-1]).abs().max()):.1f}"
    return found


@torch.no_grad()
def staying(size: int) -> dict[str, Any]:
    """Whether mazes that converged to the right answer keep it and their tolerance."""
    model: Any = wp.tasks.load("mazes")
    model.layer.on_failure, model.layer.max_steps = "ignore", 192
    X, y = puzzles("mazes", size, seed=0)  # the weights are of this seed; no maze was trained on

    def right(logits: torch.Tensor) -> torch.Tensor:
        return (logits.argmax(1) == y).flatten(1).all(1)

    first = right(model(X))
    solution = model.layer.last_solution
    converged, z, cell = solution.converged, solution.value, model.layer.cell
    lost, left, largest = torch.zeros_like(first), torch.zeros_like(first), 0.0
    for _ in range(AFTER):
        new = cell(z, X)
        residual = (new - z).flatten(1).norm(dim=1) / new.flatten(1).norm(dim=1)
        left |= converged & (residual > model.layer.rtol)
        largest = max(largest, float(residual[converged].max()))
        z = new
        now = right(model.head(z).movedim(3, 1))
        lost |= converged & first & ~now
    return {
        "size": f"{size} x {size}",
        "mazes": len(X),
        "converged": int(converged.sum()),
        "right": int((converged & first).sum()),
        "left": int(left.sum()),
        "residual": f"{largest:.3f}",
        "lost": int(lost.sum()),
        "lost_at_end": int((converged & first & ~now).sum()),
    }


@torch.no_grad()
def bounds() -> list[dict[str, Any]]:
    """True distances of drawn images from their equilibria, which float64 knows, over both bounds of them."""
    X = wp.data.load("deblurring_leaves", n=1, n_test=IMAGES, seed=5).X_test
    cell = wp.tasks.load("deblurring").layer.cell
    exact = wp.imaging.Reconstructor(copy.deepcopy(cell).double(), rtol=1e-13, max_steps=500, on_failure="raise")(X.double())
    found = []
    for rtol in SMALL:
        model = wp.imaging.Reconstructor(cell, rtol=rtol, max_steps=500, on_failure="raise")
        distance = (model(X).double() - exact).flatten(1).norm(dim=1)
        quick = model.layer.last_solution.error_bound(cell.contraction).double()
        ratios = [float((distance / bound).max()) for bound in (quick, model.error_bound(X))]
        found.append({"rtol": f"{rtol:.0e}", "quick": f"{ratios[0]:.2f}", "proved": f"{ratios[1]:.2f}"})
    return found


def imaging() -> dict[str, Any]:
    """PSNR of the data, and that of two networks after `TRIALS`, steps of both parts of the training."""
    data, more = wp.data.load("deblurring"), wp.data.load("natural64").X_test
    noisy = task_imaging.blur(more) + task_imaging.NOISE * torch.randn(more.shape, generator=torch.Generator().manual_seed(1))
    pairs = {"cbsd68": (data.X_test, data.y_test), "natural64": (noisy, more)}
    found: dict[str, Any] = {"data": {name: round(float(task_imaging.psnr(*pair).mean()), 2) for name, pair in pairs.items()}}
    X, y = data.X_test[::8], data.y_test[::8]
    found |= {"photographs": len(X), "trials": []}
    for before, steps in TRIALS:
        model: Any = task_imaging.make("bounded", 0)
        optimizer, generator = torch.optim.Adam(model.parameters()), torch.Generator().manual_seed(0)
        share = task_imaging.BEFORE if before else 0.0
        marks = [share * i / before for i in range(before)] + [share + (1 - share) * i / steps for i in range(steps)]
        model.layer.rtol = 3e-3
        for done in marks:
            x = task_imaging.some(data.y, generator)
            task_imaging.advance(model, optimizer, x, generator, done, share)
        model.layer.rtol = 1e-3
        with torch.no_grad():
            value = round(float(task_imaging.psnr(model(X), y).mean()), 2)
        found["trials"].append({"before": before, "steps": steps, "psnr": value})
    return found


PARTS: dict[str, Any] = {"distant": distant, "staying": lambda: [staying(size) for size in SIZES]}
PARTS |= {"bounds": bounds, "imaging": imaging}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS), help="the others stay as they are")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    found |= {"nodes": LENGTH, "after": AFTER} | {part: PARTS[part]() for part in options.parts}
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
