"""Figures of the metrics and certificates of runs. Several runs share a figure in a comparison."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from wellposed.certify import Certificate
from wellposed_lab.report._page import Figure, number, thinned
from wellposed_lab.report._read import RunData, as_number
from wellposed_lab.runs.records import each

__all__ = ["COLOURS", "Lines", "axes", "line", "losses", "margin", "margins", "measure", "norm_lines", "plain"]

#: At least 3:1 against the light and the dark background, so that no figure depends on the theme.
COLOURS = ("#3b82f6", "#d97706", "#16a34a", "#8b5cf6", "#ef4444", "#0d9488", "#db2777", "#6b7280")
#: Marks on lines, one for each time that the colours begin again.
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star")
#: Dashes that can be distinguished at a glance: a longer dash beside a dash cannot.
PARTS = {"train": "solid", "validation": "dot", "test": "dash"}
CERTIFIED = "dashdot"
#: Titles of measures.
MEASURES = {"accuracy": "Accuracy", "miou": "Mean intersection over union", "equilibrium_steps": "Equilibrium solves"}
#: Theorems about existence and uniqueness only.
WELL_POSED = ("contraction", "monotone", "perron_frobenius")

Points = Sequence[tuple[float, float]]


def plain(text: str) -> str:
    """Text for Plotly, which interprets a few tags in names and labels."""
    return html.escape(text, quote=False)


def line(name: str, points: Iterable[tuple[Any, Any]], colour: int, **options: Any) -> dict[str, Any]:
    """A trace of points joined by lines.

    Args:
        name: In the legend.
        points: (x, y); y None breaks the line.
        colour: Number of the colour; after the last one they repeat, with other marks.
        options: Of the trace, in place of the defaults.
    """
    pairs = thinned(list(points))
    shade, turn = COLOURS[colour % len(COLOURS)], colour // len(COLOURS)
    marker = {"color": shade, "size": 6, "symbol": SYMBOLS[turn % len(SYMBOLS)], **options.pop("marker", {})}
    if turn:
        marker |= {"size": 8, "maxdisplayed": 20}
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(pairs) <= 40 or turn else "lines",
        "name": plain(name),
        "x": [x for x, _ in pairs],
        "y": [y for _, y in pairs],
        "line": {"color": shade, "width": 2, **options.pop("line", {})},
        "marker": marker,
        "hovertemplate": "%{y:.4g}",
        **options,
    }


def axes(x: str, y: str, *, log: bool = False, **options: Any) -> dict[str, Any]:
    """A layout with titled axes, the vertical one logarithmic if `log`, and further `options`."""

    def title(text: str) -> dict[str, Any]:
        return {"text": plain(text), "font": {"size": 13}, "standoff": 8}

    vertical: dict[str, Any] = {"title": title(y), "type": "log" if log else "linear", "automargin": True}
    if log:
        vertical["exponentformat"] = "power"
    return {"xaxis": {"title": title(x), "automargin": True}, "yaxis": vertical, **options}


class Lines:
    """The lines of a figure, a sentence about each, and their numbers."""

    def __init__(self) -> None:
        self.traces: list[dict[str, Any]] = []
        self.sentences: list[str] = []
        self.rows: list[tuple[str, int, float]] = []

    def add(
        self,
        label: str,
        points: Sequence[tuple[Any, Any]],
        colour: int,
        said: str,
        *,
        listed: Sequence[tuple[Any, Any]] | None = None,
        **options: Any,
    ) -> None:
        """A line; the sentence is label + `said`, the numbers are `listed` or the points."""
        self.traces.append(line(label, points, colour, **options))
        self.sentences.append(label + said)
        self.rows += [(label, int(x), y) for x, y in (points if listed is None else listed) if y is not None]

    def figure(
        self, key: str, title: str, layout: dict[str, Any], caption: str, header: Sequence[str], *, toggles: bool = False
    ) -> Figure:
        """The figure of these lines."""
        return Figure(key, title, self.traces, layout, " ".join(self.sentences), caption, header, self.rows, toggles)


def _labelled(runs: Sequence[RunData]) -> Iterator[tuple[int | None, str, RunData]]:
    """(number, beginning of labels, run); a single run has no number and no name."""
    for index, run in enumerate(runs):
        yield (index, f"{run.name}: ", run) if len(runs) > 1 else (None, "", run)


def losses(runs: Sequence[RunData]) -> Figure | str:
    """Measured and certified losses, on a logarithmic axis; or why there is no figure."""
    lines, remarks = Lines(), []
    for index, first, run in _labelled(runs):
        for place, (part, dash) in enumerate(PARTS.items()):
            if points := run.column(f"{part}_loss"):
                (e0, y0), (e1, y1) = points[0], points[-1]
                said = f" loss {number(y0)} at epoch {e0:g}, {number(y1)} at epoch {e1:g}."
                style = {"dash": "solid" if index is None else dash}
                lines.add(f"{first}{part}", points, place if index is None else index, said, line=style)
        remark, certified = certified_losses(run)
        remarks.append(first + remark)
        if known := [(epoch, loss) for epoch, loss in certified if loss is not None]:
            colour = 4 if index is None else index
            said = f" loss {number(known[-1][1])} at epoch {known[-1][0]:g}."
            options: dict[str, Any] = {"line": {"dash": CERTIFIED, "width": 2.5}, "connectgaps": False}
            options |= {"mode": "lines"} if colour < len(COLOURS) else {}
            lines.add(f"{first}certified", certified, colour, said, **options)
    if not lines.traces:
        return "metrics.jsonl holds no losses, so there is no figure of them."
    layout = axes("epoch", "loss, mean over samples", log=True, hovermode="x unified")
    caption = " ".join(dict.fromkeys(remarks))
    return lines.figure("loss", "Loss, measured and certified", layout, caption, ("line", "epoch", "loss"), toggles=True)


def measure(runs: Sequence[RunData], name: str) -> Figure | None:
    """A measure of all parts (`train_accuracy`), or `equilibrium_steps`; None if no run has it."""
    lines, whole = Lines(), name == "equilibrium_steps"
    for index, first, run in _labelled(runs):
        for place, part in enumerate(["equilibria"] if whole else PARTS):
            if points := run.column(name if whole else f"{part}_{name}"):
                said = f" {number(points[-1][1])} at epoch {points[-1][0]:g}."
                style = {"dash": "solid" if index is None else PARTS.get(part, "solid")}
                lines.add(f"{first}{part}", points, place if index is None else index, said, line=style)
    if not lines.traces:
        return None
    if whole:
        label = "evaluations of the map, a sample"
        failed = sum(int(value) for run in runs for _, value in run.column("unconverged"))
        found = f"{failed} equilibria were not found." if failed else "Every equilibrium was found."
        if any(run.column("train_unconverged") for run in runs):
            last = sum(int(points[-1][1]) for run in runs if (points := run.column("test_unconverged")))
            found = f"Training takes few steps and looks for no equilibria; of the last test samples {last} were not found."
        caption = f"Mean over the samples of the epoch. {found}"
    else:
        label = MEASURES[name].lower()
        caption = "Of all samples of each part, at the parameters after the epoch."
    layout = axes("epoch", label, hovermode="x unified")
    if not whole:
        layout["yaxis"]["tickformat"] = ".0%"
    return lines.figure(name.replace("_", "-"), MEASURES[name], layout, caption, ("line", "epoch", label))


def margin(runs: Sequence[RunData]) -> Figure | str:
    """By how much well-posedness is proved, along training."""
    lines = Lines()
    for _, first, run in _labelled(runs):
        for label, points in margins(run).items():
            least = min(value for _, value in points)
            word = "positive throughout" if least > 0 else "not positive throughout"
            said = f": {word}, least {number(least)}, last {number(points[-1][1])}."
            lines.add(first + label, points, len(lines.traces), said)
    if not lines.traces:
        return "No certificate states a margin of well-posedness, so there is no figure of it."
    zero = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": 0, "y1": 0, "line": {"color": "#ef4444", "width": 1.5}}
    layout = axes("epoch", "margin", shapes=[zero], hovermode="x unified", showlegend=True)
    layout["yaxis"]["rangemode"] = "tozero"
    caption = (
        "Where the margin is above 0, the red line, exactly one equilibrium is proved for every input: the margin is a "
        "rigorous lower bound."
    )
    return lines.figure("margin", "Margin of well-posedness", layout, caption, ("condition", "epoch", "margin"))


def norm_lines(runs: Sequence[RunData]) -> Figure | str:
    """The norms in the certificates."""
    lines = Lines()
    for _, first, run in _labelled(runs):
        for label, points in _norms(run).items():
            said = f" from {number(points[0][1])} to {number(points[-1][1])}."
            lines.add(first + label, points, len(lines.traces), said)
    if not lines.traces:
        return "No certificate holds measured norms, so there is no figure of them."
    layout = axes("epoch", "norm", log=True, hovermode="x unified", showlegend=True)
    caption = (
        "As they went into the certificates, in the letters of the theorems: for example W or R is the recurrent matrix, U the "
        "input matrix, a or v the read-out, X the inputs, Z the equilibria, r the residuals. Spectral norms; Frobenius where F "
        "stands."
    )
    return lines.figure("norms", "Norms at the certificates", layout, caption, ("norm", "epoch", "value"), toggles=True)


def margins(run: RunData) -> dict[str, list[tuple[float, float]]]:
    """By condition of well-posedness: (epoch, margin). Positive is proved."""
    found: dict[str, list[tuple[float, float]]] = {}
    for epoch, certificate in run.certificates:
        for one in each(certificate):
            for hypothesis in one.hypotheses if one.theorem in WELL_POSED else ():
                value = as_number(hypothesis.margin)
                if value is not None:
                    found.setdefault(f"{one.theorem}: {hypothesis.name}", []).append((epoch, value))
    return found


def _norms(run: RunData) -> dict[str, Points]:
    """By name: (epoch, norm), of everything measured with the name of a norm, |W| or |X|_F.

    Theorems have different letters for the same matrix: equal lines become one, "|R|, |W|".
    """
    found: dict[str, dict[float, float]] = {}
    for epoch, certificate in run.certificates:
        for one in each(certificate):
            for name, value in one.measured.items():
                norm, name = as_number(value), name.split(" < ")[0]  # a hypothesis, "|W| < 1", names its left side
                if norm is not None and name.startswith("|") and name.endswith(("|", "|_F")):
                    found.setdefault(name, {}).setdefault(epoch, norm)
    names: dict[tuple[tuple[float, float], ...], list[str]] = {}
    for name, points in found.items():
        names.setdefault(tuple(sorted(points.items())), []).append(name)
    return {", ".join(same): list(points) for points, same in names.items()}


def certified_losses(run: RunData) -> tuple[str, list[tuple[float, float | None]]]:
    r"""What certificates prove about the training loss, from each to the next.

    A descent: |r_k| <= q^k |r_0|, so the loss, |r|^2 over a constant, is at most q^(2k) times that
    at the certificate. A flow: |r(t)| <= exp(-s t) |r_0|; a step of plain descent on the mean over
    n samples with rate lr is lr/n of its time.

    Returns:
        A sentence about the line, and its points, broken between certificates.
    """
    held = [(epoch, c) for epoch, c in run.certificates if c.certified and as_number(c.rate) is not None]
    if not run.certificates:
        return "No certificate was made, so there is no certified loss.", []
    if not held:
        return "No certificate with a rate holds, so there is no certified loss.", []
    rows = {row["epoch"]: row for row in run.rows if as_number(row.get("step")) is not None}
    flow_step = _flow_step(run)
    points: list[tuple[float, float | None]] = []
    for index, (epoch, certificate) in enumerate(held):
        start = as_number(rows.get(epoch, {}).get("train_loss"))
        if start is None or (certificate.dynamics == "flow" and flow_step is None):
            continue
        end = held[index + 1][0] if index + 1 < len(held) else max(rows)
        taken = {e: float(row["step"]) - float(rows[epoch]["step"]) for e, row in rows.items()}
        bound = [(e, _bound(certificate, start, steps, flow_step)) for e, steps in taken.items() if steps >= 0]
        points += [(e, value) for e, value in bound if epoch <= e <= end] + [(end, None)]
    if not points:
        return (
            "The certificates are about gradient flow, in time; the steps of this optimizer have no place on it, so nothing is "
            "drawn. Their rates are in the table of certificates.",
            [],
        )
    flows = held[-1][1].dynamics == "flow"
    what = "gradient flow, whose time is the step size times the steps" if flows else "gradient descent"
    name = run.key("optimizer", "name") or "its own optimizer"
    return (
        f"The certified loss, dashed in the figure, is proved for full-batch {what} with the certified steps, started at "
        f"the parameters of each certificate. This run took steps of {name} instead, to which it is a comparison and not "
        "a bound.",
        points,
    )


def _bound(certificate: Certificate, start: float, steps: float, flow_step: float | None) -> float:
    rate = certificate.rate or 0.0
    if certificate.dynamics == "flow":
        return start * math.exp(-2 * rate * (flow_step or 0.0) * steps)
    return start * rate ** (2 * steps)


def _flow_step(run: RunData) -> float | None:
    """The time of the flow in one step of plain full-batch descent; None for other optimizers."""
    samples = run.summary.get("samples")
    n = as_number(samples.get("train")) if isinstance(samples, dict) else None
    size, batch = as_number(run.key("optimizer", "lr")), as_number(run.key("run", "batch_size"))
    is_plain = (
        run.key("optimizer", "name") == "sgd"
        and run.key("optimizer", "schedule") == "constant"
        and not any(run.key("optimizer", name) for name in ("momentum", "weight_decay", "clip", "warmup"))
    )
    if n is None or size is None or not (n > 0 and size > 0 and is_plain) or (batch is not None and batch < n):
        return None
    return size / n
