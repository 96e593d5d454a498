"""Curves: losses of training, residuals and paths of solvers, spectra, figures of experiments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from wellposed.errors import InvalidArgument
from wellposed.plot._figure import COLORS, array, new_figure, record_of
from wellposed.plot._panels import draw


def losses(histories: Any, *, rates: Mapping[str, float] | None = None) -> Any:
    r"""The loss of one or several runs, solid; dashed what their certificate promised: loss_0
    q^(2k) or loss_0 e^(-2 q t).

    Args:
        histories: A `History` or its record, or a dictionary of them by name.
        rates: Certified rates q by name, for runs that do not carry a certificate.

    Examples:
        >>> import torch, wellposed as wp
        >>> model, X = torch.nn.Linear(1, 1), torch.ones(1, 1)
        >>> history = wp.descend(model, X, X, step_size=0.1, steps=10)
        >>> figure = wp.plot.losses({"descent": history})
        >>> len(figure.axes)
        1
    """
    single = hasattr(histories, "to_dict") or "rows" in histories
    named = {"loss": histories} if single else histories
    figure = new_figure(6.0, 3.8)
    ax = figure.subplots()
    horizontal = "step"
    for i, (name, one) in enumerate(named.items()):
        record = record_of(one, "history", ("kind", "rows", "certificate"))
        flow = record["kind"] == "flow"
        horizontal = "time" if flow else "step"
        k = array([row[horizontal] for row in record["rows"]])
        loss = array([row["loss"] for row in record["rows"]])
        color = COLORS[i % len(COLORS)]
        ax.plot(k, np.where(loss > 0, loss, np.nan), color=color, linewidth=1.6, label=f"{name}, measured")
        rate = _rate(record, name, rates)
        if rate is not None:
            log = np.log(loss[0]) + (
                -2 * rate * k if flow else 2 * k * np.log(rate) if rate > 0 else np.where(k > 0, -np.inf, 0)
            )
            ax.plot(k, np.exp(log), "--", color=color, linewidth=1.2, label=f"{name}, certified bound")
    ax.set(xlabel=horizontal, ylabel="loss", yscale="log")
    ax.grid(alpha=0.3)
    ax.legend(fontsize=8)
    return figure


def _rate(record: Mapping[str, Any], name: str, rates: Mapping[str, float] | None) -> float | None:
    if rates is not None and name in rates:
        return float(rates[name])
    certificate = record["certificate"]
    rate = None if certificate is None else certificate.get("rate")
    return None if rate is None else float(rate)


FIELDS = ("points", "residuals", "explained", "names")


def trajectories(record: Any, *, labels: Any = None, samples: int = 40, columns: int = 4) -> Any:
    """A panel for each trajectory of a `Projection`: a line for each sample, a dot at its end.

    Args:
        record: A `Projection` or its record, with at least two components.
        labels: (batch,) classes; samples are coloured by them. By default by their place in the
            batch.
        samples: At most so many samples are drawn.
        columns: Panels side by side.

    Examples:
        >>> import torch, wellposed as wp
        >>> model = wp.GaussianDEQ(3, 8, generator=torch.Generator().manual_seed(0))
        >>> path = wp.landscape.trajectory(model, torch.eye(3), solver=wp.Picard())
        >>> figure = wp.plot.trajectories(wp.landscape.project([path]))
    """
    found = record_of(record, "projection", FIELDS)
    points = [array(part) for part in found["points"]]
    if points[0].shape[2] < 2:
        raise InvalidArgument(f"trajectories needs two components; this projection has {points[0].shape[2]}.")
    classes = None if labels is None else np.asarray(labels)
    across = min(columns, len(points))
    down = -(-len(points) // across)
    figure = new_figure(3.4 * across, 3.3 * down)
    axes = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True)
    for ax, part, name in zip(axes.flat, points, found["names"], strict=False):
        if classes is not None and len(classes) != part.shape[1]:
            raise InvalidArgument(f"labels must have one class for each of {part.shape[1]} samples; got {len(classes)}.")
        for sample in range(min(samples, part.shape[1])):
            way = part[np.isfinite(part[:, sample]).all(axis=1), sample]
            color = _color(sample if classes is None else int(classes[sample]))
            ax.plot(way[:, 0], way[:, 1], "-", color=color, linewidth=0.7, alpha=0.6)
            ax.plot(way[-1, 0], way[-1, 1], "o", color=color, markersize=3)
        ax.plot(part[0, 0, 0], part[0, 0, 1], "k+", markersize=8)
        ax.set_title(name, fontsize=10)
    for ax in axes.flat[len(points) :]:
        ax.set_axis_off()
    parts = array(found["explained"])
    figure.supxlabel(f"component 1 ({parts[0]:.0%} of the variance)", fontsize=9)
    figure.supylabel(f"component 2 ({parts[1]:.0%})", fontsize=9)
    if classes is not None:
        for kind in sorted(set(classes[: min(samples, len(classes))].tolist())):
            axes.flat[0].plot([], [], "o", color=_color(int(kind)), markersize=4, label=str(kind))
        figure.legend(loc="outside right center", title="class", fontsize=8)
    return figure


def residuals(record: Any, *, samples: int = 40, names: Sequence[str] | None = None) -> Any:
    """Residuals against evaluations: thin lines for samples, a thick one for their median.

    Args:
        record: A `Projection` or its record; or a list of (steps, batch) arrays.
        samples: At most so many samples of each are drawn thin.
        names: Instead of those of the record.

    Examples:
        >>> import torch, wellposed as wp
        >>> f, z0 = lambda z: 0.5 * z + 1, torch.zeros(3, 1)
        >>> runs = [wp.fixed_point(f, z0, solver, record=True).history for solver in (wp.Picard(), wp.Broyden())]
        >>> figure = wp.plot.residuals(runs, names=["Picard", "Broyden"])
    """
    if isinstance(record, (list, tuple)):
        curves, titles = [array(part) for part in record], [str(i) for i in range(len(record))]
    else:
        found = record_of(record, "projection", FIELDS)
        curves, titles = [array(part) for part in found["residuals"]], list(found["names"])
    titles = titles if names is None else list(names)
    figure = new_figure(6.0, 3.8)
    ax = figure.subplots()
    for i, (curve, title) in enumerate(zip(curves, titles, strict=True)):
        color = COLORS[i % len(COLORS)]
        positive = np.where(curve > 0, curve, np.nan)  # an exact zero has no place on a logarithmic scale
        for sample in range(min(samples, curve.shape[1])):
            ax.plot(np.arange(1, len(curve) + 1), positive[:, sample], color=color, linewidth=0.4, alpha=0.3)
        together = np.isfinite(curve).all(axis=1)
        steps = np.arange(1, len(curve) + 1)[together]
        ax.plot(steps, np.median(positive[together], axis=1), color=color, linewidth=2, label=title)
    ax.set(xlabel="evaluations of the map", ylabel="|f(z) - z| / |f(z)|", yscale="log")
    ax.grid(alpha=0.3)
    ax.legend(fontsize=8)
    return figure


def _color(number: int) -> str:
    from matplotlib import colormaps

    return str(_hex(colormaps["tab10"](number % 10)))


def _hex(color: Any) -> str:
    from matplotlib.colors import to_hex

    return to_hex(color)


def spectrum(eigenvalues: Any, *, lower_bounds: Mapping[str, float] | None = None) -> Any:
    """Eigenvalues in descending order on a logarithmic scale; others than positive are counted.

    Args:
        eigenvalues: (n,) of one kernel, or a dictionary of them by name. A matrix is not accepted:
            compute its eigenvalues.
        lower_bounds: Proved lower bounds of the least eigenvalue by name, drawn as dashed lines.

    Examples:
        >>> import torch, wellposed as wp
        >>> model = wp.GaussianDEQ(4, 32, dtype=torch.float64)
        >>> H = wp.tangent_kernel(model, torch.eye(4, dtype=torch.float64))
        >>> figure = wp.plot.spectrum(torch.linalg.eigvalsh(H))
        >>> figure.axes[0].get_yscale()
        'log'
    """
    named = eigenvalues if isinstance(eigenvalues, Mapping) else {"eigenvalues": eigenvalues}
    figure = new_figure(6.0, 3.8)
    ax = figure.subplots()
    for i, (name, values) in enumerate(named.items()):
        if hasattr(values, "detach"):
            values = values.detach().cpu().numpy()
        numbers = np.sort(array(values))[::-1]
        if numbers.ndim != 1:
            raise InvalidArgument(f"spectrum needs the (n,) eigenvalues of {name}; got shape {array(values).shape}.")
        color = COLORS[i % len(COLORS)]
        positive = numbers > 0
        hidden = int((~positive).sum())
        label = f"{name} ({hidden} not positive)" if hidden else name
        ax.plot(np.arange(1, len(numbers) + 1)[positive], numbers[positive], ".-", color=color, markersize=3, label=label)
        bound = None if lower_bounds is None else lower_bounds.get(name)
        if bound is not None and bound > 0:
            ax.axhline(bound, color=color, linestyle="--", linewidth=1, label=f"{name}, proved lower bound of the least")
    ax.set(xlabel="number", ylabel="eigenvalue", yscale="log")
    ax.grid(alpha=0.3)
    ax.legend(fontsize=8)
    return figure


#: Panels in a row.
_COLUMNS = 3


def _columns(panels: Sequence[Mapping[str, Any]]) -> int:
    """Pictures of the same kind stand side by side: 4 or 5 in a row if that fits their number."""
    pictures = sum(panel.get("kind") in ("ways", "contour") for panel in panels)
    fitting = [columns for columns in (5, 4) if pictures and pictures % columns == 0]
    return min([*fitting, _COLUMNS][0], len(panels))


def experiment(record: Any) -> Any:
    """The panels of an experiment: curves (the mean over seeds as a line, least and greatest as a
    band), ways in a plane, contours of a loss, or bars for the rows of a table.

    Args:
        record: A `Record` of `wellposed_lab.papers`, or its `to_dict()`.

    Examples:
        >>> import wellposed as wp
        >>> curve = {"label": "a run", "x": [0, 1, 2], "y": [4.0, 2.0, 1.0]}
        >>> panel = {"title": "Loss", "x_label": "step", "y_label": "loss", "curves": [curve]}
        >>> record = {"experiment": "mine/figure1", "title": "Training", "size": "quick", "panels": [panel]}
        >>> figure = wp.plot.experiment(record)  # or the Record that `wellposed_lab.papers.reproduce` returns
    """
    record = record_of(record, "reproduced experiment", ("experiment", "title", "size", "panels"))
    panels = record["panels"]
    if not panels:
        raise InvalidArgument(f"The record of {record['experiment']} has no panels to draw.")
    columns = _columns(panels)
    rows = -(-len(panels) // columns)
    bars = max(len(panel.get("rows", ())) for panel in panels)
    figure = new_figure(max(5.0, 4.2 * columns), max(3.2, 0.17 * bars + 1.0) * rows + 0.4)
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for ax, panel in zip(axes, panels, strict=False):
        draw(ax, panel)
    for ax in axes[len(panels) :]:
        ax.set_axis_off()
    separator = ":\n" if columns == 1 else ": "
    figure.suptitle(f"{record['experiment']}{separator}{record['title']} ({record['size']})", fontsize=10)
    return figure
