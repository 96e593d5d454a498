"""Figures of reproduced experiments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from wellposed.errors import InvalidArgument
from wellposed.plot._figure import COLORS, array, new_figure, record_of

__all__ = ["experiment"]

#: Panels in a row.
_COLUMNS = 3


def experiment(record: Any) -> Any:
    """The panels of an experiment's record: the mean over seeds as a line, the least and the greatest as a band.

    Args:
        record: A `Record` of `wellposed_lab.papers`, or its `to_dict()`.
    """
    record = record_of(record, "reproduced experiment", ("experiment", "title", "size", "panels"))
    panels = record["panels"]
    if not panels:
        raise InvalidArgument(f"The record of {record['experiment']} has no panels to draw.")
    columns = min(_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    figure = new_figure(max(5.0, 4.2 * columns), 3.2 * rows + 0.4)
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for ax, panel in zip(axes, panels, strict=False):
        _draw(ax, panel)
    for ax in axes[len(panels) :]:
        ax.set_axis_off()
    separator = ":\n" if columns == 1 else ": "
    figure.suptitle(f"{record['experiment']}{separator}{record['title']} ({record['size']})", fontsize=10)
    return figure


def _draw(ax: Any, panel: Mapping[str, Any]) -> None:
    for i, curve in enumerate(panel["curves"]):
        x, y, color = array(curve["x"]), np.atleast_2d(array(curve["y"])), COLORS[i % len(COLORS)]
        if panel.get("y_scale") == "log":
            y = np.where(y > 0, y, np.nan)
        known = np.isfinite(y).all(axis=0)  # a run that ended early would bend the mean
        x, y = x[known], y[:, known]
        if not len(x):
            continue
        # on a log axis the middle is the geometric mean
        log = panel.get("y_scale") == "log"
        middle = np.exp(np.mean(np.log(y), axis=0)) if log else np.mean(y, axis=0)
        style = {"marker": "o", "markersize": 3} if len(x) <= 12 else {}
        ax.plot(x, middle, color=color, linewidth=1.6, label=curve["label"], linestyle=curve.get("style", "-"), **style)
        if len(y) > 1:
            ax.fill_between(x, np.min(y, axis=0), np.max(y, axis=0), color=color, alpha=0.18, linewidth=0)
    for line in panel.get("lines", ()):
        ax.axhline(line["y"], color="0.35", linestyle=":", linewidth=1.2, label=line["label"])
    ax.set(xlabel=panel["x_label"], ylabel=panel["y_label"], title=panel["title"])
    ax.set_xscale(panel.get("x_scale", "linear"))
    if panel.get("x_scale") == "log" and panel["curves"]:  # few points, such as widths: they are the ticks
        ticks = panel["curves"][0]["x"]
        ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        ax.set_xticks([], minor=True)
    ax.set_yscale(panel.get("y_scale", "linear"))
    ax.grid(alpha=0.3)
    if panel["curves"]:
        ax.legend(fontsize=8)
