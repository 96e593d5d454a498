"""Measure where the weights of the package end: chains longer than trained on, and mazes iterated after they converged.

    python benchmarks/task_limits.py

Writes benchmarks/results/task_limits.json, from which `make tables` copies into docs/tasks/graphs.md and
docs/tasks/reasoning.md. It trains nothing, and takes about two minutes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

import wellposed as wp
from task_reasoning import puzzles

RESULTS = Path(__file__).parent / "results" / "task_limits.json"
#: Nodes of the chains, and how many of them there are.
LENGTH, CHAINS = 400, 20
TOLERANCES = {"1e-5 (default)": 1e-5, "1e-8": 1e-8, "1e-14": 1e-14}
#: Sizes of mazes, and the iterations after the last of them converged or was given up.
SIZES, AFTER = (9, 13), 400


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


def main() -> None:
    found: dict[str, Any] = {"nodes": LENGTH, "after": AFTER, "distant": distant()}
    found["staying"] = [staying(size) for size in SIZES]
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
