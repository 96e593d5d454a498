"""Draw the pictures of docs/tasks from benchmarks/results.

    python benchmarks/task_pictures.py

Writes docs/images/task_graphs.png, task_imaging.png and task_reasoning.png, each if what it shows is measured,
task_segmentation.png, for which it trains a network for seconds, and the thumbnails of the overview,
docs/images/thumbnail_*.png. All images in them are drawn.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

import wellposed as wp
from wellposed.tasks._store import INCLUDED

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))
from segmentation import NAMES, streets, train  # noqa: E402

CLASSES = np.array([(0.6, 0.75, 0.95), (0.45, 0.45, 0.45), (0.2, 0.55, 0.25), (0.84, 0.37, 0.0)])  # of NAMES
COLOURS = ["#0072B2", "#009E73", "#E69F00", "#D55E00", "#CC79A7"]  # distinct also for most colour-blind readers


def graphs(results: dict[str, Any]) -> Figure:
    """Accuracy by the distance from the first node, on the longest chains."""
    length = max(run["length"] for run in results["runs"])
    runs = [run for run in results["runs"] if run["length"] == length]
    figure = Figure(figsize=(7, 3), layout="constrained", facecolor="white")
    ax = figure.subplots()
    for name, label, colour in (("ours", "equilibrium", COLOURS[0]), ("gcn", "GCN with 5 layers", COLOURS[3])):
        curves = np.array([run[name]["by_distance"] for run in runs])
        ax.plot(100 * curves.mean(0), color=colour, linewidth=2, label=label)
        ax.fill_between(np.arange(length), 100 * curves.min(0), 100 * curves.max(0), color=colour, alpha=0.2, linewidth=0)
    ax.axhline(5, color="grey", linestyle=":", label="chance")
    ax.set(xlabel="edges from the node that has the class", ylabel="accuracy (%)", ylim=(0, 103), xlim=(0, length - 1))
    ax.legend(loc="center right", frameon=False)
    return figure


def reasoning(results: dict[str, Any]) -> Figure:
    """Exact answers by iterations for every difficulty, and a maze with its way."""
    figure = Figure(figsize=(10, 3.4), layout="constrained", facecolor="white")
    places = figure.subplots(1, 3, width_ratios=[1, 1, 0.8])
    for ax, name, title in zip(
        places, ("sudoku", "mazes"), ("sudoku (trained: 6 to 10 givens)", "mazes (trained: 9 x 9)"), strict=False
    ):
        runs = [run for run in results["runs"] if run["puzzle"] == name]
        marks = results["marks"][name]
        levels = list(runs[0]["levels"]) if runs else []
        for level, colour in zip(levels, COLOURS, strict=False):
            label = f"{level} givens" if name == "sudoku" else f"{level} x {level}"
            for carry, style in ((True, "-"), (False, ":")):
                curves = [run["levels"][level]["curve"] for run in runs if run["carry"] is carry]
                if curves:
                    ax.plot(marks, 100 * np.mean(curves, axis=0), style, color=colour, label=label if carry else None)
        ax.set(xlabel="iterations", ylabel="exact answers (%)", title=title, xscale="log", ylim=(-3, 103))
        ticks = [m for m in (1, 2, 4, 8, 16, 32, 64, 128) if marks[0] <= m <= marks[-1]]
        ax.set_xticks(ticks, [str(m) for m in ticks])
        ax.minorticks_off()
        ax.legend(frameon=False, fontsize=8)
    places[2].imshow(maze())
    places[2].set(title="a maze of 21 x 21 and its way", xticks=[], yticks=[])
    return figure


def maze() -> np.ndarray:
    """(21, 21, 3) walls, start, end and the way between them."""
    data = wp.data.load("mazes", n=1, size=21, seed=3)
    walls, start, end = data.X[0].numpy()
    picture = np.ones((21, 21, 3))
    picture[data.y[0].numpy() == 1] = (0.34, 0.71, 0.91)
    picture[walls == 1] = 0.2
    picture[start == 1], picture[end == 1] = (0, 0.62, 0.45), (0.84, 0.37, 0)
    return picture


def imaging(results: dict[str, Any]) -> Figure:
    """PSNR by iterations if it is measured, and a drawn image restored by the weights of the package."""
    data = wp.data.load("deblurring_leaves", n=1, n_test=1, size=128, seed=3)
    with torch.no_grad():
        restored = wp.tasks.load("deblurring")(data.X_test)
    images = {"blurred, with noise": data.X_test, "restored": restored, "truth": data.y_test}
    figure = Figure(figsize=(13 if results["runs"] else 9, 3.3), layout="constrained", facecolor="white")
    places = list(figure.subplots(1, 4 if results["runs"] else 3, squeeze=False)[0])
    if results["runs"]:
        ax = places.pop(0)
        kinds = ("bounded", "equilibrium", COLOURS[0]), ("unrolled_free", "10 unrolled steps, free", COLOURS[3])
        for kind, label, colour in (*kinds, ("unrolled", "10 unrolled steps, bounded", COLOURS[2])):
            curves = np.array([run[kind]["curve"] for run in results["runs"]])
            ax.plot(results["marks"], curves.mean(axis=0), color=colour, label=label, marker=".")
        ax.axvline(10, color="grey", linestyle=":", linewidth=1)
        ax.set(xlabel="iterations", ylabel="PSNR of test images (dB)", xscale="log", xticks=results["marks"])
        ax.set_xticklabels([str(mark) for mark in results["marks"]])
        ax.minorticks_off()
        ax.legend(frameon=False, fontsize=8)
    for ax, (title, image) in zip(places, images.items(), strict=True):
        error = float((image - data.y_test).square().mean())
        ax.imshow(image[0].movedim(0, 2).clamp(0, 1).numpy())
        ax.set(title=f"{title}, {-10 * np.log10(error):.1f} dB" if error else title, xticks=[], yticks=[])
    return figure


def segmentation() -> Figure:
    """A drawn street, what a network says that was trained for seconds, and the truth."""
    generator = torch.Generator().manual_seed(0)
    (X, y), (X_test, y_test) = streets(400, generator), streets(3, generator)
    model = wp.nn.MultiscaleDEQ.segmenter(3, (16, 16), len(NAMES), groups=1, generator=generator, rtol=1e-2)
    train(model, X, y, steps=150, generator=generator)
    with torch.no_grad():
        predicted = model.eval()(X_test).argmax(1)
    figure = Figure(figsize=(9, 3.3), layout="constrained", facecolor="white")
    drawn = {"a drawn street": X_test[0].movedim(0, 2).clamp(0, 1).numpy()}
    right = float((predicted[0] == y_test[0]).float().mean())
    drawn |= {f"the network, {right:.0%} right": CLASSES[predicted[0]], "truth": CLASSES[y_test[0]]}
    for ax, (title, image) in zip(figure.subplots(1, 3), drawn.items(), strict=True):
        ax.imshow(image)
        ax.set(title=title, xticks=[], yticks=[])
    for k, name in enumerate(NAMES):
        figure.axes[1].plot([], [], "s", color=CLASSES[k], label=name)
    figure.axes[1].legend(loc="lower center", ncols=4, fontsize=7, framealpha=0.8, handletextpad=0.1, columnspacing=0.6)
    return figure


def thumbnail(name: str, results: dict[str, Any]) -> Figure:
    """A small picture of a task, without axes: measured curves of graphs and language, data of the others."""
    figure = Figure(figsize=(2, 1.25), facecolor="white")
    ax = figure.add_axes((0.02, 0.03, 0.96, 0.94))
    ax.set(xticks=[], yticks=[])
    if name == "graphs":
        run = max(results["runs"], key=lambda run: run["length"])
        for kind, colour in (("ours", COLOURS[0]), ("gcn", COLOURS[3])):
            ax.plot(run[kind]["by_distance"], color=colour, linewidth=2)
        ax.set_ylim(0, 1.08)
    elif name == "language":
        for kind, colour in (("equilibrium", COLOURS[0]), ("explicit", COLOURS[3])):
            run = next(run for run in results["runs"] if (run["tokens"], run["model"]) == ("characters", kind))
            ax.plot([row["step"] for row in run["history"]], [row["held_out"] for row in run["history"]], color=colour)
    elif name == "reasoning":
        ax.imshow(maze())
    elif name == "segmentation":  # the left half as seen, the right half as classes
        X, y = streets(1, torch.Generator().manual_seed(1), 64)
        seen = X[0].movedim(0, 2).clamp(0, 1).numpy()
        ax.imshow(np.concatenate([seen[8:48, :32], CLASSES[y[0]][8:48, 32:]], axis=1), aspect="auto")
    else:  # the left half blurred and with noise, the right half as drawn
        data = wp.data.load("deblurring_leaves", n=1, n_test=1, size=128, seed=3)
        image = torch.cat([data.X_test[0, :, :80, :64], data.y_test[0, :, :80, 64:]], dim=2)
        ax.imshow(image.movedim(0, 2).clamp(0, 1).numpy(), aspect="auto")
        ax.axvline(63.5, color=COLOURS[2], linewidth=1.5)
    return figure


def main() -> None:
    images = ROOT / "docs" / "images"
    for name, draw in (("graphs", graphs), ("imaging", imaging), ("reasoning", reasoning), ("language", None)):
        results = ROOT / "benchmarks" / "results" / f"{name}.json"
        if not results.exists():
            continue
        found = json.loads(results.read_text())
        thumbnail(name, found).savefig(images / f"thumbnail_{name}.png", dpi=100)
        if draw is not None and (name != "imaging" or (INCLUDED / "deblurring").is_dir()):
            draw(found).savefig(images / f"task_{name}.png", dpi=80 if name == "imaging" else 110)
    torch.set_num_threads(1)
    segmentation().savefig(images / "task_segmentation.png", dpi=110)
    thumbnail("segmentation", {}).savefig(images / "thumbnail_segmentation.png", dpi=100)


if __name__ == "__main__":
    main()
