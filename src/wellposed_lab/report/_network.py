"""What the network of a run shows: tangent kernel, predictions, how far parameters moved."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from wellposed.kernel import tangent_kernel
from wellposed.nn.families import is_theory_network
from wellposed_lab.report._charts import COLOURS, Lines, axes, line, plain
from wellposed_lab.report._page import Figure, number, table, thinned
from wellposed_lab.runs.checkpoint import newest
from wellposed_lab.runs.losses import Segmentation, Squared
from wellposed_lab.runs.processes import on_threads, threads_for
from wellposed_lab.runs.run import read_config
from wellposed_lab.runs.setup import RunProblem, prepare
from wellposed_lab.runs.training_state import restore

__all__ = ["NetworkState", "network_state", "parameter_table", "predictions", "spectrum"]

#: Samples of the kernel, where it has a closed form; elsewhere samples times outputs, each of which costs a gradient.
KERNEL_SAMPLES, KERNEL_GRADIENTS = 256, 64
#: Samples of each part whose predictions are shown, and how many are evaluated at once.
PREDICTED, BATCH = 1000, 100
#: Images whose pixels are counted.
PREDICTED_IMAGES = 16
#: Bars of a histogram.
BINS = 30


@dataclass(frozen=True)
class ParameterNorm:
    """Frobenius norms of a parameter: at the start, now, and of the difference."""

    name: str
    shape: tuple[int, ...]
    start: float
    now: float
    distance: float


@dataclass
class NetworkState:
    """The network at its last checkpoint.

    Attributes:
        epoch: Of the checkpoint; None at the start.
        parameters: Norms.
        spectra: By moment ("at the start", "after epoch 20"), eigenvalues of the tangent kernel,
            largest first.
        kernel_samples: Training samples of the kernel, and all training samples.
        kind: "signs", "numbers" or "classes".
        predictions: By part (y_hat, y) for signs and numbers, as plain lists.
        confusion: By part: row true class, column predicted class.
        remarks: What could not be computed, a sentence each.
    """

    epoch: int | None = None
    parameters: list[ParameterNorm] = field(default_factory=list)
    spectra: dict[str, list[float]] = field(default_factory=dict)
    kernel_samples: tuple[int, int] = (0, 0)
    kind: str = ""
    predictions: dict[str, tuple[list[float], list[float]]] = field(default_factory=dict)
    confusion: dict[str, list[list[int]]] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)


def network_state(folder: Path) -> NetworkState:
    """Loads the network of a run and evaluates it; what fails becomes a remark."""
    state = NetworkState()
    with warnings.catch_warnings(record=True) as caught, torch.random.fork_rng(devices=[]):
        warnings.simplefilter("always")
        try:
            with on_threads():
                _fill(state, folder)
        except Exception as error:  # the data are a file of any origin, and the records can be shown without them
            text = " ".join(str(error).split()) or type(error).__name__
            state.remarks.append(f"The network could not be loaded or evaluated. {text}")
    state.remarks += sorted({" ".join(str(warning.message).split()) for warning in caught})
    return state


def _fill(state: NetworkState, folder: Path) -> None:
    config = read_config(folder)
    problem = prepare(config)
    model = problem.model
    torch.set_num_threads(threads_for(model, problem.parts.train[0]))
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    checkpoint = newest(folder / "checkpoints", config.fingerprints(), log=state.remarks.append)
    if checkpoint is None:
        state.remarks.append("There is no checkpoint; the network is shown as it was at the start.")
    X = _kernel_inputs(state, problem)
    if X is not None:
        state.spectra["at the start"] = _eigenvalues(model, X)
    if checkpoint is not None:
        restore(checkpoint, model)
        state.epoch = checkpoint.epoch
        if X is not None:
            state.spectra[f"after epoch {checkpoint.epoch}"] = _eigenvalues(model, X)
    for name, parameter in model.named_parameters():
        now = parameter.detach()
        norms = (float(tensor.double().norm()) for tensor in (start[name], now, now - start[name]))
        state.parameters.append(ParameterNorm(name, tuple(now.shape), *norms))
    _predict(state, problem)


def _kernel_inputs(state: NetworkState, problem: RunProblem) -> Tensor | None:
    X, _ = problem.parts.train
    with torch.no_grad():
        outputs = problem.model(X[:1]).numel()
    closed = is_theory_network(problem.model)
    n = min(len(X), KERNEL_SAMPLES if closed else KERNEL_GRADIENTS // outputs)
    state.kernel_samples = (n, len(X))
    if n < 2:
        state.remarks.append(
            f"The tangent kernel is omitted: with {outputs} outputs a sample, two samples take more than {KERNEL_GRADIENTS} "
            "gradients."
        )
        return None
    return X[:n]


def _eigenvalues(model: nn.Module, X: Tensor) -> list[float]:
    """Of K_ij = <df(x_i), df(x_j)>, largest first; several outputs count as several rows."""
    K = tangent_kernel(model, X).double().cpu()
    values: list[float] = torch.linalg.eigvalsh(K).flip(0).tolist()
    return values


def _predict(state: NetworkState, problem: RunProblem) -> None:
    loss = problem.loss
    state.kind = "classes" if not isinstance(loss, Squared) else ("signs" if loss.signs else "numbers")
    limit = PREDICTED_IMAGES if isinstance(loss, Segmentation) else PREDICTED
    for part, (X, y) in problem.parts.items():
        X, y = X[:limit], y[:limit].cpu()
        with torch.no_grad():
            output = torch.cat([problem.model(batch).cpu() for batch in X.split(min(BATCH, limit))])
        if state.kind != "classes":
            state.predictions[part] = (output.double().tolist(), y.double().tolist())
            continue
        classes = output.shape[1]
        counted = y != loss.ignore_index if isinstance(loss, Segmentation) else torch.ones_like(y, dtype=torch.bool)
        pairs = y[counted] * classes + output.argmax(dim=1)[counted]
        state.confusion[part] = torch.bincount(pairs, minlength=classes**2).reshape(classes, classes).tolist()


def spectrum(states: Mapping[str, NetworkState]) -> Figure | str:
    """Eigenvalues of the tangent kernel, largest first, on a logarithmic axis.

    Args:
        states: By name of the run; names are shown if there are several.
    """
    lines, counts, several = Lines(), [], len(states) > 1
    for index, (name, state) in enumerate(states.items()):
        first = f"{name}: " if several else ""
        for place, (moment, values) in enumerate(state.spectra.items()):
            lost = sum(value <= 0 for value in values)
            below = f" {lost} are not positive, by rounding, and not drawn." if lost else ""
            ranked = list(enumerate(values, start=1))
            shown = [(rank, value if value > 0 else None) for rank, value in ranked]
            said = f": largest {number(values[0])}, least {number(values[-1])}.{below}"
            dash = "dot" if several and moment == "at the start" else "solid"
            colour = index if several else place
            lines.add(first + moment, shown, colour, said, listed=thinned(ranked, 20), line={"dash": dash})
        if state.spectra:
            n, of = state.kernel_samples
            counts.append(f"{first}{n} of {of} training samples" if n < of else f"{first}all {of} training samples")
    if not lines.traces:
        return "The tangent kernel could not be computed, so there is no spectrum."
    layout = axes("rank", "eigenvalue", log=True, hovermode="x unified", showlegend=True)
    caption = (
        f"Eigenvalues of K = J J^T, J the derivative of the outputs by all parameters, on {'; '.join(counts)}. "
        "The least one decides how fast gradient descent must learn. They are computed, not bounded."
    )
    header = ("moment", "rank", "eigenvalue")
    return lines.figure("spectrum", "Spectrum of the tangent kernel", layout, caption, header, toggles=True)


def predictions(state: NetworkState) -> list[Figure] | str:
    """The outputs of the network against the targets."""
    if state.kind == "signs" and state.predictions:
        histogram = _histogram(state)
        return histogram if isinstance(histogram, str) else [histogram]
    if state.kind == "numbers" and state.predictions:
        return [_scatter(state)]
    if state.confusion:
        shown = {part: matrix for part, matrix in state.confusion.items() if part == "test" or len(state.confusion) == 1}
        return [_confusion(part, matrix) for part, matrix in shown.items()]
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
            mean = math.fsum(value / len(finite) for value in finite) if finite else None  # the sum need not be finite
            rows.append((name, len(chosen), wrong, mean))
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


def parameter_table(state: NetworkState) -> dict[str, Any] | None:
    """How far every parameter moved."""
    rows = [
        (p.name, " × ".join(map(str, p.shape)), p.start, p.now, p.distance, p.distance / p.start if p.start else None)
        for p in state.parameters
    ]
    header = ("parameter", "shape", "at the start", "now", "distance", "distance / start")
    return table("Frobenius norms of the parameters", header, rows) if rows else None
