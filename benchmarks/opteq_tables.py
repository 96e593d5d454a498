"""Tables of the finished runs of examples/opteq_{cifar10,contenders,camvid}.py.

    python benchmarks/opteq_tables.py runs.jsonl [more.jsonl ...]

Reads the ledgers that the examples wrote; writes results/opteq_tables.json (the runs as they are) and results/opteq_tables.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import platform
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
Run = dict[str, Any]


def table(titles: list[str], rows: list[list[str]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def mean(run: Run, name: str) -> str:
    """Of a number over the epochs, or a dash."""
    values = [epoch[name] for epoch in run["history"] if name in epoch]
    return f"{sum(values) / len(values):.3g}" if values else "-"


def share(run: Run) -> str:
    """The samples whose equilibrium converged: least over epochs, training and test."""
    values = [epoch[name] for epoch in run["history"] for name in ("converged", "test_converged") if name in epoch]
    return f"{100 * min(values):.4g}%" if values else "-"


def scores(run: Run, name: str) -> list[str]:
    """At the end, and the best of all epochs, in percent."""
    values = [epoch[name] for epoch in run["history"]]
    return [f"{100 * values[-1]:.1f}", f"{100 * max(values):.1f}"]


def training(runs: list[Run]) -> str:
    """One sentence of what all of these runs have in common."""
    parts = []
    for name in ("images", "test_images", "epochs", "batch", "seed", "channels", "lr"):
        seen = sorted({str(run[name]) for run in runs})
        parts.append(f"{name.replace('_', ' ')} {', '.join(seen)}")
    return "; ".join(parts) + "."


def table_1a(runs: list[Run]) -> str:
    """Accuracy of every alpha and prior."""
    rows = [
        [
            f"{run['alpha']:g}",
            run["prior"],
            *scores(run, "accuracy"),
            f"{run['history'][-1]['train_loss']:.3f}",
            mean(run, "steps"),
            mean(run, "adjoint_steps"),
            share(run),
            "-" if run["contraction_upper"] is None else f"{run['contraction_upper']:.3f}",
            f"{run['mean_abs_z']:.3g}",
            f"{100 * run['zeros_of_z']:.0f}%",
            mean(run, "cpu_seconds"),
        ]
        for run in sorted(runs, key=lambda run: (run["prior"] != "none", run["prior"], run["alpha"]))
    ]
    titles = ["alpha", "prior", "accuracy", "best", "train loss", "steps", "adjoint steps", "converged"]
    return table([*titles, "contraction <=", "mean abs z", "z = 0", "CPU s / epoch"], rows)


def table_1b(runs: list[Run]) -> str:
    rows = [
        [
            run["name"],
            str(run["parameters"]),
            f"{run['lr']:g}",
            *scores(run, "accuracy"),
            f"{run['history'][-1]['train_loss']:.3f}",
            f"{run['evaluations_per_pass']:.3g}" if "evaluations_per_pass" in run else mean(run, "steps"),
            mean(run, "adjoint_steps"),
            share(run),
            mean(run, "cpu_seconds"),
        ]
        for run in runs
    ]
    titles = ["network", "parameters", "lr", "accuracy", "best", "train loss", "evaluations", "adjoint steps", "converged"]
    return table([*titles, "CPU s / epoch"], rows)


def table_2(runs: list[Run]) -> str:
    rows = [
        [
            run["name"],
            str(run["parameters"]),
            f"{run['lr']:g}",
            *(scores(run, name)[0] for name in ("mIoU", "mAcc", "aAcc")),
            scores(run, "mIoU")[1],
            f"{run['history'][-1]['train_loss']:.3f}",
            mean(run, "steps"),
            share(run),
            mean(run, "cpu_seconds"),
        ]
        for run in runs
    ]
    titles = ["network", "parameters", "lr", "mIoU", "mAcc", "aAcc", "best mIoU", "train loss", "steps", "converged"]
    return table([*titles, "CPU s / epoch"], rows)


def tuning(runs: list[Run]) -> str:
    """The score on held-out training images of every learning rate tried."""
    rows = [
        [
            run["table"],
            run["name"],
            f"{run['lr']:g}",
            f"{run['images'] * 4 // 5} x {run['epochs']}",
            scores(run, "accuracy" if "accuracy" in run["history"][0] else "mIoU")[0],
            f"{run['history'][-1]['train_loss']:.3f}",
        ]
        for run in sorted(runs, key=lambda run: (run["table"], run["name"], run["lr"]))
    ]
    return table(["table", "network", "lr", "images x epochs", "accuracy or mIoU", "train loss"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make tables of finished runs.")
    parser.add_argument("ledgers", type=Path, nargs="+")
    options = parser.parse_args()
    runs: list[Run] = [
        json.loads(line, parse_constant=lambda _: None) for path in options.ledgers for line in path.read_text().splitlines()
    ]
    final = [run for run in runs if not run["tune"]]
    parts = {
        "Table 1a: alpha and priors": ("1a", table_1a),
        "Table 1b: implicit networks of equal size": ("1b", table_1b),
        "Table 2: segmentation of CamVid": ("2", table_2),
    }
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    text = [
        "# OptEq: the paper's tables, sized for a CPU",
        f"{today}, {platform.machine()}, torch {torch.__version__}, one thread. The machine was busy with other work: CPU\n"
        "seconds (of the process, training only) are too long, by a factor that changes from run to run. Scores are in\n"
        "percent, on test images, at the end and best of all epochs (the latter is chosen on the test images). Steps are\n"
        "evaluations of the map per sample, for the ODEs evaluations of the field per batch, forward and backward. Converged\n"
        "is the least share of any epoch. All networks of a table have the same stem, head, images, order and optimizer.",
    ]
    for title, (name, make) in parts.items():
        chosen = [run for run in final if run["table"] == name]
        if chosen:
            text += [f"## {title}", training(chosen), make(chosen)]
            if name != "2":
                error = 100 * math.sqrt(0.25 / min(run["test_images"] for run in chosen))
                text.append(f"One standard error of an accuracy near one half is {error:.1f} points.")
    tried = [run for run in runs if run["tune"]]
    if tried:
        text += ["## Learning rates tried", "On held-out training images; no test image was used.", tuning(tried)]
    (RESULTS / "opteq_tables.md").write_text("\n\n".join(text) + "\n")
    (RESULTS / "opteq_tables.json").write_text(json.dumps(runs, indent=1, allow_nan=False) + "\n")
    print("\n\n".join(text))


if __name__ == "__main__":
    main()
