"""Trains a solver of 4x4 sudoku or of mazes that iterates until its answer no longer changes.

    python examples/puzzles.py sudoku
    python examples/puzzles.py mazes

A batch is a set of running puzzles. Each training step records a few iterations of all of them and
carries the states to the next step; a puzzle is replaced when it has converged to its answer, or at
random. `--save FOLDER` writes the weights for `wp.tasks.load`.
"""

from __future__ import annotations

import argparse
import math
import time

import torch
from torch import Tensor, nn

import wellposed as wp
from wellposed.tasks import PuzzleSolver

MAKE = {"sudoku": PuzzleSolver.sudoku, "mazes": PuzzleSolver.mazes}
#: Puzzles to train on, steps, puzzles of a step, rate of learning.
NUMBER, STEPS = {"sudoku": 2000, "mazes": 4000}, {"sudoku": 200, "mazes": 2000}
BATCH, RATE = {"sudoku": 64, "mazes": 32}, {"sudoku": 3e-3, "mazes": 2e-3}


def exact(logits: Tensor, y: Tensor) -> Tensor:
    """(n,) whether every cell of a puzzle is right."""
    return (logits.argmax(1) == y).flatten(1).all(1)


def train(name: str, model: PuzzleSolver, X: Tensor, y: Tensor, *, steps: int, seed: int = 0, carry: bool = True) -> float:
    """AdamW with a warm-up and a cosine; returns the seconds of processor time.

    Without `carry` every step has new puzzles and starts at zero: a network of fixed depth.
    """
    generator, batch = torch.Generator().manual_seed(seed), BATCH[name]
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=RATE[name], weight_decay=0.01)
    factor = lambda k: min(1.0, (k + 1) / 50) * (0.5 + 0.5 * math.cos(math.pi * k / steps))  # noqa: E731
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    rows = torch.randint(len(X), (batch,), generator=generator)
    z = model.start(X[rows])
    begin = time.process_time()
    for step in range(steps):
        logits = model(X[rows], z)
        loss = nn.functional.cross_entropy(logits, y[rows])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        solution = model.layer.last_solution
        right = exact(logits, y[rows])
        done = (solution.converged & right) | (torch.rand(batch, generator=generator) < (0.2 if carry else 1.0))
        rows = torch.where(done, torch.randint(len(X), (batch,), generator=generator), rows)
        z = torch.where(done.reshape(-1, *[1] * (z.dim() - 1)), 0.0, solution.value)
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.4f}, {right.float().mean():.0%} right after the recorded steps", flush=True)
    return time.process_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("puzzle", choices=list(MAKE))
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", metavar="FOLDER", help="where to write the weights")
    options = parser.parse_args()
    name, steps = options.puzzle, options.steps or STEPS[options.puzzle]
    data = wp.data.load(name, n=NUMBER[name], n_test=200, seed=options.seed)
    model = MAKE[name](generator=torch.Generator().manual_seed(options.seed))
    seconds = train(name, model, *data, steps=steps, seed=options.seed)
    with torch.no_grad():
        right = exact(model.eval()(data.X_test), data.y_test).float().mean()
    solution = model.layer.last_solution
    print(f"{steps} steps in {seconds:.0f} s of processor time; {right:.1%} of {len(data.X_test)} test puzzles are right")
    converged, evaluations = solution.converged.float().mean(), solution.num_steps.float().mean()
    print(f"{converged:.1%} converged, in {evaluations:.1f} evaluations on average")
    if options.save:
        card = {"data": data.steps[0], "license": "MIT", "steps": steps, "test_exact": float(right)}
        print(wp.tasks.save(model, name, options.save, card=card))


if __name__ == "__main__":
    main()
