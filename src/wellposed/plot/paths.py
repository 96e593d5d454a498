"""The ways of solvers: in a plane, and by their residuals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from wellposed.errors import InvalidArgument
from wellposed.plot._figure import COLORS, array, new_figure, record_of

__all__ = ["residuals", "trajectories"]

FIELDS = ("points", "residuals", "explained", "names")


def trajectories(record: Any, *, labels: Any = None, samples: int = 40, columns: int = 4) -> Any:
    """A panel for each trajectory of a `Projection`, all in the same plane: a line for each sample, a dot where it ends.

    Args:
        record: A `Projection` or its record, with at least two components.
        labels: (batch,) classes; samples are coloured by them. By default by their place in the batch.
        samples: At most so many samples are drawn.
        columns: Panels side by side.
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
    """Relative residuals against evaluations: thin lines for samples, a thick one for their median while all take part.

    Args:
        record: A `Projection` or its record; or a list of (steps, batch) arrays.
        samples: At most so many samples of each are drawn thin.
        names: Instead of those of the record.
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
