"""Figures out of the metrics and certificates of runs. Several runs share a figure in a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wellposed_lab.report._certified import margins, norms, promise
from wellposed_lab.report._figure import COLOURS, Figure, axes, line
from wellposed_lab.report._html import number
from wellposed_lab.report._read import RunFiles

__all__ = ["losses", "margin", "measure", "norm_lines"]

#: Dashes that can be told apart at a glance: a longer dash beside a dash cannot.
PARTS = {"train": "solid", "validation": "dot", "test": "dash"}
CERTIFIED = "dashdot"
#: How a measure is called on the page.
MEASURES = {"accuracy": "Accuracy", "miou": "Mean intersection over union", "equilibrium_steps": "Equilibrium solves"}


def losses(runs: Sequence[RunFiles]) -> Figure | str:
    """Losses measured against certified, on a logarithmic axis; or why there is no figure."""
    traces, sentences, rows, remarks = [], [], [], []
    for index, run in enumerate(runs):
        first = f"{run.name}: " if len(runs) > 1 else ""
        for place, part in enumerate(PARTS):
            points = run.column(f"{part}_loss")
            if not points:
                continue
            colour = index if len(runs) > 1 else place
            traces.append(line(f"{first}{part}", points, colour, line={"dash": PARTS[part] if len(runs) > 1 else "solid"}))
            (e0, y0), (e1, y1) = points[0], points[-1]
            sentences.append(f"{first}{part} loss {number(y0)} at epoch {e0:g}, {number(y1)} at epoch {e1:g}.")
            rows += [(f"{first}{part}", int(epoch), value) for epoch, value in points]
        sentence, points_of_promise = promise(run)
        remarks.append(first + sentence)
        if points_of_promise:
            colour = index if len(runs) > 1 else 4
            style = {"dash": CERTIFIED, "width": 2.5}
            bare = {"mode": "lines"} if colour < len(COLOURS) else {}
            traces.append(line(f"{first}certified", points_of_promise, colour, line=style, connectgaps=False, **bare))
            known = [(e, y) for e, y in points_of_promise if y is not None]
            sentences.append(f"{first}certified loss {number(known[-1][1])} at epoch {known[-1][0]:g}.")
            rows += [(f"{first}certified", int(epoch), value) for epoch, value in known]
    if not traces:
        return "metrics.jsonl holds no losses, so there is no figure of them."
    layout = axes("epoch", "loss, mean over samples", log=True, hovermode="x unified")
    return Figure(
        "loss",
        "Loss, measured and certified",
        traces,
        layout,
        " ".join(sentences),
        " ".join(dict.fromkeys(remarks)),
        ("line", "epoch", "loss"),
        rows,
        toggles=True,
    )


def measure(runs: Sequence[RunFiles], name: str) -> Figure | None:
    """A measure of all parts (`train_accuracy`), or one without parts (`equilibrium_steps`); None if no run has it."""
    traces: list[dict[str, Any]] = []
    sentences: list[str] = []
    rows: list[tuple[str, int, float]] = []
    title = MEASURES[name]
    whole = name == "equilibrium_steps"
    for index, run in enumerate(runs):
        first = f"{run.name}: " if len(runs) > 1 else ""
        for place, part in enumerate(["equilibria"] if whole else PARTS):
            points = run.column(name if whole else f"{part}_{name}")
            if points:
                colour = index if len(runs) > 1 else place
                dash = PARTS.get(part, "solid") if len(runs) > 1 else "solid"
                traces.append(line(f"{first}{part}", points, colour, line={"dash": dash}))
                sentences.append(f"{first}{part} {number(points[-1][1])} at epoch {points[-1][0]:g}.")
                rows += [(f"{first}{part}", int(epoch), value) for epoch, value in points]
    if not traces:
        return None
    caption = "Of all samples of each part, at the parameters after the epoch."
    label = title.lower()
    if whole:
        label = "evaluations of the map, a sample"
        failed = sum(int(value) for run in runs for _, value in run.column("unconverged"))
        caption = "Mean over the samples of the epoch. " + (
            f"{failed} equilibria were not found." if failed else "Every equilibrium was found."
        )
    layout = axes("epoch", label, hovermode="x unified")
    if not whole:
        layout["yaxis"]["tickformat"] = ".0%"
    return Figure(name.replace("_", "-"), title, traces, layout, " ".join(sentences), caption, ("line", "epoch", label), rows)


def margin(runs: Sequence[RunFiles]) -> Figure | str:
    """By how much well-posedness is proved, along training."""
    traces: list[dict[str, Any]] = []
    sentences: list[str] = []
    rows: list[tuple[str, int, float]] = []
    for run in runs:
        first = f"{run.name}: " if len(runs) > 1 else ""
        for label, points in margins(run).items():
            traces.append(line(first + label, points, len(traces)))
            least = min(value for _, value in points)
            word = "positive throughout" if least > 0 else "not positive throughout"
            sentences.append(f"{first}{label}: {word}, least {number(least)}, last {number(points[-1][1])}.")
            rows += [(first + label, int(epoch), value) for epoch, value in points]
    if not traces:
        return "No certificate states a margin of well-posedness, so there is no figure of it."
    zero = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 0, "y1": 0, "line": {"color": "#ef4444", "width": 1.5}}
    layout = axes("epoch", "margin", shapes=[zero], hovermode="x unified", showlegend=True)
    layout["yaxis"]["rangemode"] = "tozero"
    return Figure(
        "margin",
        "Margin of well-posedness",
        traces,
        layout,
        " ".join(sentences),
        "Above the red line exactly one equilibrium is proved for every input: by a bound from the side that can only harm.",
        ("condition", "epoch", "margin"),
        rows,
    )


def norm_lines(runs: Sequence[RunFiles]) -> Figure | str:
    """Norms that went into certificates."""
    traces: list[dict[str, Any]] = []
    sentences: list[str] = []
    rows: list[tuple[str, int, float]] = []
    for run in runs:
        first = f"{run.name}: " if len(runs) > 1 else ""
        for label, points in norms(run).items():
            traces.append(line(first + label, points, len(traces)))
            sentences.append(f"{first}{label} from {number(points[0][1])} to {number(points[-1][1])}.")
            rows += [(first + label, int(epoch), value) for epoch, value in points]
    if not traces:
        return "No certificate holds measured norms, so there is no figure of them."
    return Figure(
        "norms",
        "Norms at the certificates",
        traces,
        axes("epoch", "norm", log=True, hovermode="x unified", showlegend=True),
        " ".join(sentences),
        "As they went into the certificates, in the letters of the theorems: for example W or R is the recurrent matrix, U the "
        "input matrix, a or v the read-out, X the inputs, Z the equilibria, r the residuals. Spectral norms; Frobenius where F "
        "stands.",
        ("norm", "epoch", "value"),
        rows,
        toggles=True,
    )
