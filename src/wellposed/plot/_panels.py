"""One panel of the figure of an experiment: curves, ways in a plane, contours, or bars."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from wellposed.plot._figure import COLORS, array

#: Points without a value.
_UNKNOWN = "0.8"


def draw(ax: Any, panel: Mapping[str, Any]) -> None:
    """Draws a panel of the kind that it names; "curves" if it names none.

    Args:
        ax: Axes of matplotlib.
        panel: With `title`, `x_label`, `y_label`, and what its kind needs.
    """
    {"curves": _curves, "ways": _ways, "contour": _contour, "bars": _bars}[panel.get("kind", "curves")](ax, panel)
    ax.set(xlabel=panel["x_label"], ylabel=panel["y_label"])
    ax.set_title(panel["title"], fontsize=10)


def _curves(ax: Any, panel: Mapping[str, Any]) -> None:
    """The mean over seeds as a line, least and greatest as a band."""
    log = panel.get("y_scale") == "log"
    for i, curve in enumerate(panel["curves"]):
        x, y, color = array(curve["x"]), np.atleast_2d(array(curve["y"])), COLORS[i % len(COLORS)]
        if log:
            y = np.where(y > 0, y, np.nan)
        known = np.isfinite(y).all(axis=0)  # a run that ended early would bend the mean
        x, y = x[known], y[:, known]
        if not len(x):
            continue
        # on a log axis the middle is the geometric mean
        middle = np.exp(np.mean(np.log(y), axis=0)) if log else np.mean(y, axis=0)
        style = {"marker": "o", "markersize": 3} if len(x) <= 12 else {}
        ax.plot(x, middle, color=color, linewidth=1.6, label=curve["label"], linestyle=curve.get("style", "-"), **style)
        if len(y) > 1:
            ax.fill_between(x, np.min(y, axis=0), np.max(y, axis=0), color=color, alpha=0.18, linewidth=0)
    for line in panel.get("lines", ()):
        ax.axhline(line["y"], color="0.35", linestyle=":", linewidth=1.2, label=line["label"])
    ax.set_xscale(panel.get("x_scale", "linear"))
    if panel.get("x_scale") == "log" and panel["curves"]:  # few points, such as widths: they are the ticks
        ticks = panel["curves"][0]["x"]
        ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        ax.set_xticks([], minor=True)
    ax.set_yscale(panel.get("y_scale", "linear"))
    ax.grid(alpha=0.3)
    if panel["curves"]:
        ax.legend(fontsize=8)


def _ways(ax: Any, panel: Mapping[str, Any]) -> None:
    """A line for each sample in the colour of its class, a dot at its end, a cross at the start."""
    from matplotlib import colormaps

    for way, kind in zip(panel["ways"], panel["classes"], strict=True):
        points, color = array(way), colormaps["tab10"](int(kind) % 10)
        ax.plot(points[:, 0], points[:, 1], "-", color=color, linewidth=0.8, alpha=0.7)
        ax.plot(points[-1, 0], points[-1, 1], "o", color=color, markersize=4)
        ax.plot(points[0, 0], points[0, 1], "k+", markersize=8)
    for kind in sorted(set(panel["classes"])):
        ax.plot([], [], "o", color=colormaps["tab10"](int(kind) % 10), markersize=4, label=str(kind))
    ax.legend(fontsize=6, ncols=2, handletextpad=0.1, columnspacing=0.5)


def _contour(ax: Any, panel: Mapping[str, Any]) -> None:
    """Contours of a loss on a square; points without a loss are grey and hatched, a white line is
    the edge of what is called small."""
    from matplotlib.colors import BoundaryNorm, ListedColormap
    from matplotlib.patches import Patch

    axis, values = array(panel["x"]), np.ma.masked_invalid(array(panel["values"]))
    low, high = panel["limits"]
    levels = np.linspace(float(low), float(high), 13)
    middle = (axis[1:] + axis[:-1]) / 2
    sides = np.concatenate([[axis[0]], middle, [axis[-1]]])  # a point stands for the square half way to its neighbours
    if values.count():
        norm = BoundaryNorm(levels, 256, extend="both")
        ax.pcolormesh(sides, sides, values.T, cmap="viridis", norm=norm)  # where contours end beside unknown points
        filled = ax.contourf(axis, axis, values.T, levels=levels, cmap="viridis", norm=norm, extend="both")
        ax.figure.colorbar(filled, ax=ax, shrink=0.9, format="%.3g", ticks=levels[::4])
        if panel["level"] is not None:
            ax.contour(axis, axis, values.T, levels=[panel["level"]], colors="white", linewidths=1.4)
    if np.ma.getmaskarray(values).any():
        unknown = np.ma.masked_where(~np.ma.getmaskarray(values), np.ones(values.shape))
        ax.pcolor(sides, sides, unknown.T, cmap=ListedColormap([_UNKNOWN]), hatch="xxxx", edgecolor="0.5", linewidth=0)
        ax.legend(handles=[Patch(facecolor=_UNKNOWN, edgecolor="0.5", hatch="xxxx", label="undecided")], fontsize=7)
    ax.plot(0, 0, "+", color="red", markersize=8)
    ax.set(xlim=(axis[0], axis[-1]), ylim=(axis[0], axis[-1]))


def _bars(ax: Any, panel: Mapping[str, Any]) -> None:
    """A bar for the mean over seeds of each row of a table, a line from least to greatest, a mark
    for what the paper prints."""
    names, rows = list(panel["rows"]), [array(values) for values in panel["rows"].values()]
    places = np.arange(len(names))[::-1]
    means = np.array([row.mean() if len(row) else np.nan for row in rows])
    ax.barh(places, means, color=COLORS[0], alpha=0.75)
    for place, row in zip(places, rows, strict=True):
        if len(row) > 1:
            ax.plot([row.min(), row.max()], [place, place], color="black", linewidth=1.2)
    printed = panel.get("printed", {})
    shown = [(printed[name], place) for name, place in zip(names, places, strict=True) if name in printed]
    if shown:
        ax.plot([x for x, _ in shown], [y for _, y in shown], "d", color=COLORS[1], markersize=5, label="in the paper")
        ax.set_ylim(-0.7, len(names) + 1.2)  # the legend covers no row
        ax.legend(fontsize=7, loc="upper right")
    ax.set_yticks(places, names, fontsize=7)
    ax.grid(alpha=0.3, axis="x")
