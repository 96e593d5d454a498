"""Figures and tables out of the network itself."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from wellposed_lab.report._figure import COLOURS, Figure, axes, line, plain, thinned
from wellposed_lab.report._html import Html, number, table
from wellposed_lab.report._state import NetworkState

__all__ = ["parameter_table", "predictions", "spectrum"]

BINS = 30


def spectrum(states: Mapping[str, NetworkState]) -> Figure | str:
    """Eigenvalues of the tangent kernel, largest first, on a logarithmic axis.

    Args:
        states: By name of the run; the name is shown where there are several.
    """
    traces, sentences, rows, counts = [], [], [], []
    for index, (name, state) in enumerate(states.items()):
        first = f"{name}: " if len(states) > 1 else ""
        for place, (moment, values) in enumerate(state.spectra.items()):
            ranked = list(enumerate(values, start=1))
            colour = index if len(states) > 1 else place
            dash = "dot" if len(states) > 1 and moment == "at the start" else "solid"
            shown = [(rank, value if value > 0 else None) for rank, value in ranked]
            traces.append(line(first + moment, shown, colour, line={"dash": dash}))
            lost = sum(value <= 0 for value in values)
            below = f" {lost} are not positive, by rounding, and not drawn." if lost else ""
            sentences.append(f"{first}{moment}: largest {number(values[0])}, least {number(values[-1])}.{below}")
            rows += [(first + moment, rank, value) for rank, value in thinned(ranked, 20)]
        if state.spectra:
            n, of = state.kernel_samples
            counts.append(f"{first}{n} of {of} training samples" if n < of else f"{first}all {of} training samples")
    if not traces:
        return "The tangent kernel could not be computed, so there is no spectrum."
    return Figure(
        "spectrum",
        "Spectrum of the tangent kernel",
        traces,
        axes("rank", "eigenvalue", log=True, hovermode="x unified", showlegend=True),
        " ".join(sentences),
        f"Eigenvalues of K = J J^T, J the derivative of the outputs by all parameters, on {'; '.join(counts)}. "
        "The least one decides how fast gradient descent must learn. They are computed, not bounded.",
        ("moment", "rank", "eigenvalue"),
        rows,
        toggles=True,
    )


def predictions(state: NetworkState) -> list[Figure] | str:
    """What the network says, against the targets."""
    if state.kind == "signs" and state.predictions:
        shown = _histogram(state)
        return shown if isinstance(shown, str) else [shown]
    if state.kind == "numbers" and state.predictions:
        return [_scatter(state)]
    if state.confusion:
        return [
            _confusion(part, matrix) for part, matrix in state.confusion.items() if part == "test" or len(state.confusion) == 1
        ]
    return "The network could not be evaluated, so there are no predictions."


def _histogram(state: NetworkState) -> Figure | str:
    outputs = [value for y_hat, _ in state.predictions.values() for value in y_hat if math.isfinite(value)]
    if not outputs:
        return "No prediction is a finite number, so there is no histogram."
    edges = _edges(min(outputs), max(outputs))
    centres, traces, sentences, rows = edges[1:] / 2 + edges[:-1] / 2, [], [], []
    for part, (y_hat, y) in state.predictions.items():
        for target in (-1.0, 1.0):
            chosen = [value for value, truth in zip(y_hat, y, strict=True) if truth == target]
            finite = [value for value in chosen if math.isfinite(value)]
            counts = np.histogram(finite, edges)[0]
            wrong = sum(not value * target > 0 for value in chosen)
            name = f"{part}, target {target:+g}"
            pattern = {"shape": "" if part == "train" else "/" if part == "test" else "x", "size": 6, "solidity": 0.5}
            traces.append(
                {
                    "type": "bar",
                    "name": plain(name),
                    "x": centres.tolist(),
                    "y": counts.tolist(),
                    "width": float(edges[1] - edges[0]),
                    "marker": {"color": COLOURS[0 if target > 0 else 1], "pattern": pattern},
                    "opacity": 0.75,
                    "visible": True if part == "test" or len(state.predictions) == 1 else "legendonly",
                    "hovertemplate": "%{fullData.name}: %{y} near %{x:.3g}<extra></extra>",
                }
            )
            sentences.append(f"{name}: {wrong} of {len(chosen)} on the wrong side of zero.")
            rows.append((name, len(chosen), wrong, _mean(finite)))
    layout = axes("prediction", "samples", barmode="overlay", showlegend=True)
    caption = "The sign decides the class; the targets are -1 and +1. Parts are switched on and off in the legend."
    header = ("part and target", "samples", "wrong sign", "mean prediction")
    return Figure("predictions", "Predictions", traces, layout, " ".join(sentences), caption, header, rows)


def _edges(low: float, high: float) -> np.ndarray:
    """Of `BINS` bins between two finite numbers, whose difference need not be one."""
    edges = np.linspace(low / 2, high / 2, BINS + 1) * 2 if high > low else np.linspace(low, low + 1.0, BINS + 1)
    if bool((edges[1:] > edges[:-1]).all()):
        return edges
    # large, and equal or nearly so: one more is not another number
    return np.sort(np.linspace(0.9, 1.0, BINS + 1) * max(low, high, key=abs))


def _mean(values: list[float]) -> float | None:
    """Of finite numbers, whose sum need not be one."""
    return math.fsum(value / len(values) for value in values) if values else None


def _scatter(state: NetworkState) -> Figure:
    traces, sentences, rows = [], [], []
    everything = [value for _, y in state.predictions.values() for value in y]
    ends = [min(everything), max(everything)]
    traces.append(line("equal", list(zip(ends, ends, strict=True)), 7, mode="lines", line={"dash": "dot"}))
    for index, (part, (y_hat, y)) in enumerate(state.predictions.items()):
        pairs = list(zip(y, y_hat, strict=True))
        hover = "%{fullData.name}: target %{x:.4g}, prediction %{y:.4g}<extra></extra>"
        traces.append(line(part, pairs, index, mode="markers", marker={"opacity": 0.7}, hovertemplate=hover))
        error = math.dist(y, y_hat) / math.sqrt(len(pairs))  # its squares may be beyond all numbers
        sentences.append(f"{part}: root mean square error {number(error)} on {len(pairs)} samples.")
        rows += [(part, a, b) for a, b in thinned(pairs, 20)]
    layout = axes("target", "prediction", showlegend=True)
    caption = "On the dotted line they are equal."
    header = ("part", "target", "prediction")
    return Figure("predictions", "Predictions", traces, layout, " ".join(sentences), caption, header, rows)


def _confusion(part: str, matrix: list[list[int]]) -> Figure:
    counts = np.array(matrix)
    right, total = int(np.trace(counts)), int(counts.sum())
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    labels = [str(index) for index in range(len(matrix))]
    trace = {
        "type": "heatmap",
        "z": shares.tolist(),
        "x": labels,
        "y": labels,
        "text": [[str(count) for count in row] for row in matrix],
        "texttemplate": "%{text}",
        "hovertemplate": "true %{y}, predicted %{x}: %{text}<extra></extra>",
        "colorscale": [[0, "rgba(59,130,246,0.04)"], [1, "rgba(59,130,246,0.85)"]],
        "zmin": 0,
        "zmax": 1,
        "colorbar": {"title": {"text": "share of row"}, "thickness": 12},
    }
    layout = axes("predicted class", "true class", height=460)
    layout["yaxis"] |= {"autorange": "reversed", "type": "category", "showgrid": False}
    layout["xaxis"] |= {"type": "category", "showgrid": False}
    alt = f"{right} of {total} are right."
    header = ("true class", *(f"predicted {label}" for label in labels))
    rows = [(label, *row) for label, row in zip(labels, matrix, strict=True)]
    title = f"Predictions of the {part} part"
    return Figure(
        "predictions", title, [trace], layout, alt, f"Counts; colour is the share of each true class. {alt}", header, rows
    )


def parameter_table(state: NetworkState) -> Html | None:
    """How far every parameter went."""
    rows = [
        (p.name, " × ".join(map(str, p.shape)), p.start, p.now, p.distance, p.distance / p.start if p.start else None)
        for p in state.parameters
    ]
    header = ("parameter", "shape", "at the start", "now", "distance", "distance / start")
    return table("Frobenius norms of the parameters", header, rows) if rows else None
