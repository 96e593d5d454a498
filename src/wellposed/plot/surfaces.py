"""Losses on lines and grids. Points that may not be believed are never drawn as if they were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from wellposed.errors import InvalidArgument
from wellposed.plot._figure import COLORS, array, new_figure, record_of

__all__ = ["contour", "line", "surface"]

FIELDS = ("coordinates", "values", "status", "status_names", "valid")
#: A hatch for each reason, in the order in which they are met.
HATCHES = ("////", "\\\\\\\\", "xxxx", "....", "----", "++++")
UNKNOWN = "#d9d9d9"


def contour(
    records: Any,
    *,
    names: Sequence[str] | None = None,
    levels: int = 15,
    log: bool = False,
    path: Any = None,
    columns: int = 4,
) -> Any:
    """Contours of one or several two-dimensional surfaces, on one scale of colours.

    Points whose loss is not known to be true are grey and hatched by reason, and the contours stop before them.

    Args:
        records: A `Surface` or its record, or a list of them.
        names: Titles.
        levels: About how many contours.
        log: Contours and colours on a logarithmic scale; the losses must be positive.
        path: (points, 2) a training path in the coordinates of the only surface, see `landscape.path_directions`.
        columns: Panels side by side.
    """
    found = _grids(records)
    if path is not None and len(found) > 1:
        raise InvalidArgument(f"A path lies on one surface; got {len(found)}.")
    low, high = _range(found, log)
    across = min(columns, len(found))
    down = -(-len(found) // across)
    figure = new_figure(3.4 * across + 1.2, 3.2 * down + 0.4)  # first of all: it says if matplotlib is missing
    from matplotlib import ticker
    from matplotlib.colors import LogNorm, Normalize

    norm = LogNorm(low, high) if log else Normalize(low, high)
    edges = np.geomspace(low, high, levels + 1) if log else ticker.MaxNLocator(levels).tick_values(low, high)
    axes = figure.subplots(down, across, squeeze=False)
    filled = None
    for i, (ax, record) in enumerate(zip(axes.flat, found, strict=False)):
        a, b = (array(axis) for axis in record["coordinates"])
        values = np.ma.masked_invalid(array(record["values"]))
        ax.set_facecolor(UNKNOWN)
        if values.count():
            filled = ax.contourf(a, b, values.T, levels=edges, norm=norm, cmap="viridis", extend="max")
            ax.contour(a, b, values.T, levels=edges, colors="black", linewidths=0.4, alpha=0.6)
        _hatch(ax, record, a, b)
        if path is not None:
            way = array(path)
            ax.plot(way[:, 0], way[:, 1], ".-", color=COLORS[1], linewidth=1, markersize=4)
        ax.plot(0, 0, "+", color="white", markersize=9, markeredgewidth=1.5)
        ax.set(xlabel="direction 1", ylabel="direction 2", xlim=(a[0], a[-1]), ylim=(b[0], b[-1]))
        if names is not None:
            ax.set_title(names[i], fontsize=10)
    for ax in axes.flat[len(found) :]:
        ax.set_axis_off()
    if filled is not None:
        figure.colorbar(filled, ax=axes, label="loss", shrink=0.9, format="%.3g", ticks=edges[:: max(1, len(edges) // 8)])
    return figure


def surface(record: Any, *, title: str | None = None, log: bool = False, clip: float | None = None) -> Any:
    """A two-dimensional surface in perspective; points that may not be believed are holes, marked on the floor.

    Args:
        record: A `Surface` or its record.
        title: Of the figure.
        log: Draw the decadic logarithm of the loss.
        clip: Losses above it are cut off, so that a steep wall does not hide the basin.
    """
    (found,) = _grids(record)
    low, high = _range([found], log)
    a, b = (array(axis) for axis in found["coordinates"])
    values = array(found["values"])
    if clip is not None:
        values, high = np.where(values > clip, clip, values), min(high, clip)
    if log:
        values, low, high = np.log10(values), np.log10(low), np.log10(high)
    A, B = np.meshgrid(a, b, indexing="ij")
    figure = new_figure(6.4, 5.0)
    ax = figure.add_subplot(projection="3d")
    from matplotlib import colormaps
    from matplotlib.colors import Normalize
    from mpl_toolkits.mplot3d.art3d import Poly3DCollection

    corners = np.stack([A, B, values], axis=-1)
    faces = np.stack([corners[:-1, :-1], corners[1:, :-1], corners[1:, 1:], corners[:-1, 1:]], axis=2).reshape(-1, 4, 3)
    faces = faces[np.isfinite(faces).all(axis=(1, 2))]  # a face is drawn if all its corners are known
    colors = colormaps["viridis"](Normalize(low, high)(faces[:, :, 2].mean(axis=1)))
    ax.add_collection3d(Poly3DCollection(list(faces), facecolors=colors, edgecolors=colors, linewidths=0.2))
    ax.set(xlim=(a[0], a[-1]), ylim=(b[0], b[-1]), zlim=(low, high))
    bad = ~np.array(found["valid"], dtype=bool)
    if bad.any():
        ax.scatter(A[bad], B[bad], np.full(bad.sum(), low), marker="x", s=12, color=COLORS[1], label=_reasons(found, bad))
        ax.legend(loc="upper left", fontsize=8)
    ax.set(xlabel="direction 1", ylabel="direction 2", zlabel="log10 of the loss" if log else "loss")
    ax.set_box_aspect(None, zoom=0.85)  # else the label of the vertical axis leaves the figure
    if title is not None:
        ax.set_title(title)
    return figure


def line(records: Mapping[str, Any] | Any, *, log: bool = False) -> Any:
    """Losses along one direction; stretches that may not be believed are shaded.

    Args:
        records: A one-dimensional `Surface` or its record, or a dictionary of them by name.
        log: A logarithmic scale of losses.
    """
    named = records if isinstance(records, Mapping) and "values" not in records else {"": records}
    figure = new_figure(6.0, 3.6)
    ax = figure.subplots()
    for i, (name, one) in enumerate(named.items()):
        record = record_of(one, "surface", FIELDS)
        (a,) = (array(axis) for axis in record["coordinates"])
        values = array(record["values"])
        if values.ndim != 1:
            raise InvalidArgument(f"line draws surfaces of one direction; got one of shape {values.shape}. Use contour.")
        color = COLORS[i % len(COLORS)]
        ax.plot(a, values, ".-", color=color, linewidth=1.2, markersize=3, label=name or None)
        bad = ~np.array(record["valid"], dtype=bool)
        half = (a[1] - a[0]) / 2 if len(a) > 1 else 0.5
        for place in a[bad]:
            ax.axvspan(place - half, place + half, color=color, alpha=0.15, linewidth=0)
        if bad.any():
            ax.plot([], [], color=color, alpha=0.3, linewidth=8, label=f"{name} {_reasons(record, bad)}".strip())
    ax.set(xlabel="direction 1", ylabel="loss")
    if log:
        ax.set_yscale("log")
    if ax.get_legend_handles_labels()[0]:
        ax.legend(fontsize=8)
    return figure


def _grids(records: Any) -> list[Mapping[str, Any]]:
    many = records if isinstance(records, (list, tuple)) else [records]
    found = [record_of(record, "surface", FIELDS) for record in many]
    for record in found:
        if len(record["coordinates"]) != 2 or min(len(axis) for axis in record["coordinates"]) < 2:
            raise InvalidArgument("This picture needs surfaces of two directions with at least two points each; use line.")
    if not found:
        raise InvalidArgument("There is no surface to draw.")
    return found


def _range(records: list[Mapping[str, Any]], log: bool) -> tuple[float, float]:
    values = np.concatenate([array(record["values"]).ravel() for record in records])
    known = values[np.isfinite(values)]
    if not known.size:
        return 0.1, 1.0  # nothing is drawn but the reasons
    low, high = float(known.min()), float(known.max())
    if log and low <= 0:
        raise InvalidArgument(f"log=True needs positive losses; the least is {low:.3g}.")
    return (low, high) if high > low else (low, low + (abs(low) or 1.0) * 1e-6)


def _hatch(ax: Any, record: Mapping[str, Any], a: np.ndarray, b: np.ndarray) -> None:
    """Marks every point that is not valid by the rectangle halfway to its neighbours."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    status = np.array(record["status"])
    bad = ~np.array(record["valid"], dtype=bool)
    handles = []
    for hatch, code in zip(HATCHES, sorted(set(status[bad].tolist())), strict=False):
        mask = np.ma.masked_where(~(bad & (status == code)), np.ones(status.shape))
        clear = ListedColormap([(0.0, 0.0, 0.0, 0.0)])  # values that were not checked shine through
        ax.pcolor(_edges(a), _edges(b), mask.T, hatch=hatch, cmap=clear, edgecolor="#777777", linewidth=0.0)
        name = str(record["status_names"][code]).lower().replace("_", " ")
        handles.append(Patch(facecolor=UNKNOWN, edgecolor="#777777", hatch=hatch, label=name))
    if handles:
        ax.legend(handles=handles, loc="upper right", fontsize=7, framealpha=0.9)


def _edges(axis: np.ndarray) -> np.ndarray:
    middle = (axis[1:] + axis[:-1]) / 2
    return np.concatenate([[2 * axis[0] - middle[0]], middle, [2 * axis[-1] - middle[-1]]])


def _reasons(record: Mapping[str, Any], bad: np.ndarray) -> str:
    codes = sorted(set(np.array(record["status"])[bad].tolist()))
    return ", ".join(str(record["status_names"][code]).lower().replace("_", " ") for code in codes)
