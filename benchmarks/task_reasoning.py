"""Measure reasoning by iteration: 4x4 sudoku and mazes, solved by a cell that is repeated until it converges.

    python benchmarks/task_reasoning.py sudoku mazes [--seeds 3] [--weights FOLDER]

Trains, or opens what an earlier call trained in FOLDER, then measures: exact answers by difficulty and by the number of
iterations, and what halting each puzzle by itself saves. The baseline is the same cell with the same recorded steps and
training steps, always started at zero: a network of fixed depth. Writes benchmarks/results/reasoning.json after every
run, skips what is there, and makes the tables from all runs; `make tables` copies the tables into docs/tasks/reasoning.md.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import wellposed as wp
from wellposed._stored import CONFIG

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))
from puzzles import MAKE, NUMBER, STEPS, exact, train  # noqa: E402

import tables  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "reasoning.json"
mean_and_error = functools.partial(tables.mean_and_error, digits=1, scale=100)  # in percent
#: Numbers of iterations at which answers are read.
MARKS = {"sudoku": [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32], "mazes": [4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192]}
#: Few iterations, to compare with, and those that the network of fixed depth was trained for.
FEW, DEPTH = {"sudoku": 3, "mazes": 16}, {"sudoku": 8, "mazes": 16}
#: Puzzles by difficulty: givens of sudoku (trained on 6 to 10), sizes of mazes (trained on 9).
LEVELS = {"sudoku": [10, 8, 6, 5, 4], "mazes": [9, 13, 17, 21]}


def puzzles(name: str, level: int, seed: int) -> tuple[Tensor, Tensor]:
    """200 test puzzles of a difficulty, 100 of large mazes; none is among those that the seed trains on."""
    if name == "sudoku":
        data = wp.data.load(name, n=1, n_test=200, seed=1000 + level, givens=(level,))
    elif level == 9:
        data = wp.data.load(name, n=NUMBER[name], n_test=200, seed=seed)
    else:
        data = wp.data.load(name, n=1, n_test=200 if level < 14 else 100, seed=1000 + level, size=level)
    return data.X_test, data.y_test


def read(model: wp.tasks.PuzzleSolver, z: Tensor) -> Tensor:
    logits = model.head(z)
    return logits.squeeze(-1) if logits.dim() == 5 else logits.movedim(3, 1)


@torch.no_grad()
def measured(model: wp.tasks.PuzzleSolver, X: Tensor, y: Tensor, marks: list[int]) -> dict[str, Any]:
    """Exact answers after numbers of iterations, all puzzles iterated; then each puzzle halted by itself.

    The comparison iterates all puzzles to the step at which the last one halts. Times are of the processor.
    """
    z, found, seconds = model.start(X), [], 0.0
    for step in range(1, marks[-1] + 1):
        begin = time.process_time()
        z = model.layer.cell(z, X)
        seconds += time.process_time() - begin
        if step in marks:
            found.append(round(float(exact(read(model, z), y).float().mean()), 4))
    model.layer.max_steps, model.layer.on_failure = marks[-1], "ignore"
    begin = time.process_time()
    logits = model(X)
    halted = time.process_time() - begin
    right, solution = exact(logits, y), model.layer.last_solution
    most = int(solution.num_steps.max())
    return {
        "curve": found,
        "puzzles": len(X),
        "exact": float(right.float().mean()),
        "converged": float(solution.converged.float().mean()),
        "converged_right": float(right[solution.converged].float().mean()) if bool(solution.converged.any()) else None,
        "evaluations": float(solution.num_steps.float().mean()),
        "least": int(solution.num_steps.min()),
        "most": most,
        "seconds": round(halted, 4),
        "seconds_all": round(seconds * most / marks[-1], 4),
    }


def run(name: str, seed: int, carry: bool, weights: Path | None) -> dict[str, Any]:
    folder = None if weights is None else weights / f"{name}-{seed}-{'carried' if carry else 'fixed'}"
    if folder is not None and (folder / CONFIG).exists():
        model: Any = wp.tasks.load(name, folder)
        seconds = model.card["seconds"]
    else:
        data = wp.data.load(name, n=NUMBER[name], n_test=1, seed=seed)
        model = MAKE[name](generator=torch.Generator().manual_seed(seed))
        seconds = round(train(name, model, *data, steps=STEPS[name], seed=seed, carry=carry), 1)
        if folder is not None:
            card = {"data": data.steps[0], "license": "MIT", "steps": STEPS[name], "seconds": seconds}
            wp.tasks.save(model, name, folder, card=card)
    model.eval()
    result: dict[str, Any] = {"puzzle": name, "seed": seed, "carry": carry, "seconds": seconds, "levels": {}}
    if note := getattr(model, "card", {}).get("note"):
        result["note"] = note
    result["parameters"] = sum(p.numel() for p in model.parameters())
    for level in LEVELS[name]:
        X, y = puzzles(name, level, seed)
        result["levels"][str(level)] = measured(model, X, y, MARKS[name])
        print(name, seed, carry, level, result["levels"][str(level)], flush=True)
    return result


def saved(ours: float, theirs: float) -> str:
    return f"{100 * (1 - ours / theirs):.0f} %"


def tables(runs: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in LEVELS:
        ours = [r for r in runs if r["puzzle"] == name and r["carry"]]
        fixed = [r for r in runs if r["puzzle"] == name and not r["carry"]]
        if not ours:
            continue
        accuracy, halts, most = [], [], MARKS[name][-1]
        for level in map(str, LEVELS[name]):
            some = [r["levels"][level] for r in ours]
            other = [r["levels"][level] for r in fixed]
            few, at = (MARKS[name].index(steps) for steps in (FEW[name], DEPTH[name]))
            mean = {
                key: statistics.mean(s[key] for s in some) for key in ("evaluations", "least", "most", "seconds", "seconds_all")
            }
            accuracy.append(
                {
                    "level": level if name == "sudoku" else f"{level} x {level}",
                    "few": mean_and_error([s["curve"][few] for s in some]),
                    "exact": mean_and_error([s["exact"] for s in some]),
                    "converged": mean_and_error([s["converged"] for s in some]),
                    "fixed_depth": mean_and_error([s["curve"][at] for s in other]) if other else "-",
                    "fixed_exact": mean_and_error([s["exact"] for s in other]) if other else "-",
                    "fixed_more": mean_and_error([s["curve"][-1] for s in other]) if other else "-",
                    "fixed_converged": mean_and_error([s["converged"] for s in other]) if other else "-",
                }
            )
            halts.append(
                {
                    "level": level if name == "sudoku" else f"{level} x {level}",
                    "evaluations": f"{mean['evaluations']:.1f}",
                    "first": f"{mean['least']:.1f}",
                    "last": f"{mean['most']:.1f}",
                    "saved_evaluations": saved(mean["evaluations"], mean["most"]),
                    "saved_time": saved(mean["seconds"], mean["seconds_all"]),
                    "maximum": most,
                    "maximum_evaluations": saved(mean["evaluations"], most),
                    "maximum_time": saved(mean["seconds"], mean["seconds_all"] * most / mean["most"]),
                }
            )
        found[f"{name}_accuracy"], found[f"{name}_halting"] = accuracy, halts
    return found


def store(runs: list[dict[str, Any]]) -> None:
    RESULTS.write_text(json.dumps({"marks": MARKS, **tables(runs), "runs": runs}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("puzzles", nargs="+", choices=list(LEVELS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--no-baseline", action="store_true", help="without the network of fixed depth")
    parser.add_argument("--weights", type=Path, help="where trained networks are kept, to measure them again")
    options = parser.parse_args()
    runs = json.loads(RESULTS.read_text())["runs"] if RESULTS.exists() else []
    for seed in range(options.seeds):
        for name in options.puzzles:
            for carry in (True,) if options.no_baseline else (True, False):
                if not any((r["puzzle"], r["seed"], r["carry"]) == (name, seed, carry) for r in runs):
                    runs.append(run(name, seed, carry, options.weights))
                    store(runs)
    store(runs)


if __name__ == "__main__":
    main()
