"""Training cost per accuracy: a `ResidualDEQ` by several recipes, and its explicit twin of 6 repeats.

    WELLPOSED_DATA=folder python benchmarks/recipe.py [--images N] [--epochs N] [--only NAME ...] [--seeds N] [--choose]

CIFAR-10, one thread, seconds of CPU of the training alone (tests are not counted). The time of a recipe is that at which its
test accuracy first reaches the best one of the twin, by straight lines between epochs; its ratio is to the time at which the
twin itself gets there. A test solves for the equilibria to a residual of 1e-3; a curve has seconds, accuracy and the part of
the equilibria that were found. Recipes share initial parameters, order of batches, optimizer and the form of the schedule.
Writes results/recipe.json. With --choose the last tenth of the training images takes the place of the test images, which a
choice among recipes must not see; writes results/recipe_choice.json.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import wellposed as wp

RESULTS = Path(__file__).parent / "results"
BATCH, LR, CHANNELS = 64, 2e-3, 24
TEST_RTOL, TEST_STEPS = 1e-3, 150  #: A test is at equilibria of this residual, or after so many evaluations.


@dataclass(frozen=True)
class Recipe:
    """How a network is trained.

    Attributes:
        rtol: Of the solves. gradient: Of the layer. max_steps: Evaluations of a solve of the training;.
        gain: Initial weight of the norm of the input inside the cell; more of it makes the map contract better.
        penalty: Of the squared Jacobian.
        solver: Of the training; `Auto()` if not given.
        unrolled: The part of the training at first that differentiates through 6 plain steps, as the twin does [bai2019].
        loose: The tolerance falls from this to `rtol` during the training, if given.
        few: Plain steps, how many of the last are differentiated, and the weight of their residual: `regularized`, if given.
        epochs: Of the training, as a multiple of those of the twin, over which the rate of learning falls.
    """

    rtol: float
    gradient: wp.implicit.AbstractGradient
    max_steps: int = 30
    gain: float = 1.0
    penalty: float = 0.0
    loose: float | None = None
    unrolled: float = 0.0
    solver: wp.solve.AbstractSolver | None = None
    few: tuple[int, int, float] | None = None
    epochs: float = 1.0

    def set_up(self, model: Any, done: float) -> None:
        """For a step of the training, of which the part `done` is over."""
        layer = model.layer
        layer.gradient = wp.UnrolledGradient(6) if done < self.unrolled else self.gradient
        layer.max_steps, layer.on_failure = self.max_steps, "ignore"
        layer.solver = wp.Auto() if self.solver is None else self.solver
        layer.rtol = self.rtol if self.loose is None else self.loose * (self.rtol / self.loose) ** done


FREE, EXACT = wp.JacobianFree(), wp.ImplicitGradient()
PHANTOM = wp.PhantomGradient(3, 1.0)
#: The gains of explicit twins; the first is compared with.
TWINS = {"twin": 1.0, "twin, gain 3": 3.0}
RECIPES: dict[str, Recipe | None] = {
    **dict.fromkeys(TWINS),
    "exact, 1e-4": Recipe(1e-4, EXACT, 200),
    "exact, 1e-2": Recipe(1e-2, EXACT),
    "free, 1e-2": Recipe(1e-2, FREE),
    "free, gain 3, 1e-2": Recipe(1e-2, FREE, gain=3.0),
    "phantom 5, at most 8": Recipe(1e-2, wp.PhantomGradient(5, 1.0), 8),
    "phantom 5, gain 3, at most 8": Recipe(1e-2, wp.PhantomGradient(5, 1.0), 8, gain=3.0),
    "unrolled 0.6, phantom 3, at most 12": Recipe(1e-2, PHANTOM, 12, unrolled=0.6),
    "free, gain 3, Picard, at most 6": Recipe(1e-2, FREE, 6, gain=3.0, solver=wp.Picard()),
    "phantom 3, gain 3, Picard, at most 6": Recipe(1e-2, PHANTOM, 6, gain=3.0, solver=wp.Picard()),
    "few steps 8/4, penalty 10": Recipe(1e-2, EXACT, few=(8, 4, 10.0), epochs=1.5),
    "few steps 8/4, penalty 10, gain 2": Recipe(1e-2, EXACT, few=(8, 4, 10.0), gain=2.0, epochs=1.5),
    "few steps 8/4, penalty 10, gain 3": Recipe(1e-2, EXACT, few=(8, 4, 10.0), gain=3.0, epochs=1.5),
    "few steps 8/4, penalty 10, gain 5": Recipe(1e-2, EXACT, few=(8, 4, 10.0), gain=5.0, epochs=1.5),
    "few steps 8/4, penalty 1": Recipe(1e-2, EXACT, few=(8, 4, 1.0), epochs=1.5),
}


def images(count: int, seed: int) -> tuple[Tensor, ...]:
    """Training and test images, each channel with mean 0 and deviation 1, and their classes."""
    data = wp.data.load("cifar10", count, flatten=False, seed=seed)
    assert data.X_test is not None and data.y_test is not None
    mean, deviation = data.X.mean((0, 2, 3), keepdim=True), data.X.std((0, 2, 3), keepdim=True)
    X, X_test = ((part.float() - mean) / deviation for part in (data.X, data.X_test))
    return X.float(), data.y.long(), X_test.float(), data.y_test.long()


@torch.no_grad()
def accuracy(model: Any, X: Tensor, y: Tensor) -> tuple[float, float]:
    """The part of the images that are right, and that of the equilibria that were found (1 for a twin)."""
    right, found = 0, 0
    for a, b in zip(X.split(100), y.split(100), strict=True):
        right += int((model(a).argmax(1) == b).sum())
        found += int(model.layer.last_solution.converged.sum()) if hasattr(model, "layer") else len(b)
    return right / len(X), found / len(X)


def train(name: str, data: tuple[Tensor, ...], epochs: int, seed: int) -> dict[str, Any]:
    """Seconds of CPU and test accuracy after every epoch."""
    X, y, X_test, y_test = data
    generator = torch.Generator().manual_seed(seed)
    recipe = RECIPES[name]
    gain = TWINS[name] if recipe is None else recipe.gain
    model: Any = wp.nn.ResidualDEQ(3, CHANNELS, 10, stride=2, grid=2, input_gain=gain, generator=generator)
    if recipe is None:
        model = model.twin(6)
    else:
        epochs = round(recipe.epochs * epochs)
    optimizer = torch.optim.Adam(model.parameters(), LR)
    steps = epochs * -(-len(X) // BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    seconds, done, curve, evaluations, failed = 0.0, 0, [], 0.0, 0
    for _ in range(epochs):
        model.train()
        for rows in torch.randperm(len(X), generator=generator).split(BATCH):
            began = time.process_time()
            extra: Any = 0.0
            if recipe is not None:
                recipe.set_up(model, done / steps)
            if recipe is not None and recipe.penalty:
                prediction, extra = model.penalized(X[rows], generator=generator)
                extra = recipe.penalty * extra
            elif recipe is not None and recipe.few is not None:
                few, recorded, weight = recipe.few
                prediction, extra = model.regularized(X[rows], steps=few, recorded=recorded, weight=weight)
            else:
                prediction = model(X[rows])
            loss = nn.functional.cross_entropy(prediction, y[rows]) + extra
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            seconds += time.process_time() - began
            done += 1
            if recipe is not None:
                evaluations += float(model.layer.last_solution.num_steps.float().mean())
                failed += int((~model.layer.last_solution.converged).sum())
        model.eval()
        if recipe is not None:
            model.layer.rtol, model.layer.max_steps, model.layer.solver = TEST_RTOL, TEST_STEPS, wp.Auto()
        curve.append((round(seconds, 2), *accuracy(model, X_test, y_test)))
        mean = round(evaluations / done, 1)
        print(f"  seed {seed}, {name}: {curve[-1]}, {mean} evaluations, {failed} solves failed", flush=True)
    return {"recipe": name, "seed": seed, "curve": curve, "evaluations": mean, "failed": failed}


def seconds_to(curve: list[tuple[float, ...]], goal: float) -> float | None:
    """When the accuracy first reaches the goal; None if it never does."""
    before: tuple[float, ...] = (0.0, 0.1)
    for now in curve:
        if now[1] >= goal:
            return before[0] + (now[0] - before[0]) * max(goal - before[1], 0.0) / max(now[1] - before[1], 1e-12)
        before = now
    return None


def ratios(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each run beside the twin of its seed: the ratio of times to the best accuracy of the twin."""
    twins = {run["seed"]: run["curve"] for run in runs if run["recipe"] == "twin"}
    rows = []
    for run in runs:
        goal = max(point[1] for point in twins[run["seed"]])
        base, mine = seconds_to(twins[run["seed"]], goal), seconds_to(run["curve"], goal)
        assert base is not None
        best, _, found = max((point[1], -point[0], point[2]) for point in run["curve"])
        row = {"recipe": run["recipe"], "seed": run["seed"], "goal": goal, "best": best, "found": found}
        rows.append(row | {"ratio": None if mine is None else round(mine / base, 2), "evaluations": run["evaluations"]})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--images", type=int, default=10000)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only", nargs="*", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument("--choose", action="store_true", help="compare on images held out of the training, not on test images")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    out = options.out or RESULTS / ("recipe_choice.json" if options.choose else "recipe.json")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", wp.errors.WellposedWarning)
    runs = []
    for seed in range(options.seeds):
        data = images(options.images, seed)
        if options.choose:
            X, y, kept = *data[:2], options.images // 10
            data = X[:-kept], y[:-kept], X[-kept:], y[-kept:]
        for name in dict.fromkeys(["twin", *options.only]):
            runs.append(train(name, data, options.epochs, seed))
            print(ratios(runs)[-1], flush=True)
            setting = {"images": options.images, "epochs": options.epochs, "batch": BATCH, "lr": LR, "channels": CHANNELS}
            found = {"setting": setting | {"torch": torch.__version__}, "ratios": ratios(runs), "runs": runs}
            out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
