"""Losses on lines and grids. Points without a checked value are marked, not drawn as values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from wellposed.errors import InvalidArgument
from wellposed.plot._figure import COLORS, array, new_figure, record_of

#: The colour of what has no value.
UNKNOWN = "#d9d9d9"
_EDGE = "#777777"


@dataclass(frozen=True)
class Mark:
    """How one reason looks.

    Attributes:
        label: In the legend.
        hatch: Of an area.
        marker: Of a point.
        valued: Whether these points have values, which stay visible.
    """

    label: str
    hatch: str
    marker: str
    valued: bool = False

    def patch(self, **options: Any) -> Any:
        """What stands in the legend."""
        from matplotlib.patches import Patch

        face = "none" if self.valued else UNKNOWN
        return Patch(
            **{"facecolor": face, "edgecolor": _EDGE, "hatch": self.hatch, "label": self.label, "linewidth": 0.6, **options}
        )

    def fill(self, ax: Any, edges: tuple[np.ndarray, np.ndarray], where: np.ndarray) -> None:
        """Hatches the rectangles of a grid, grey unless they have values.

        Args:
            ax: Where.
            edges: (k + 1,) and (l + 1,) of the rectangles.
            where: (k, l) which.
        """
        from matplotlib.colors import ListedColormap, to_rgba

        chosen = np.ma.masked_where(~where, np.ones(where.shape))
        face = ListedColormap([(0.0, 0.0, 0.0, 0.0) if self.valued else to_rgba(UNKNOWN)])
        ax.pcolor(*edges, chosen.T, hatch=self.hatch, cmap=face, edgecolor=_EDGE, linewidth=0.0)


_MARKS = {
    "PENDING": Mark("not evaluated yet", "", "_"),
    "UNCHECKED": Mark("uniqueness not checked", "...", ".", valued=True),
    "NOT_PROVED": Mark("equilibrium found, not proved", "..", ".", valued=True),
    "NOT_CONVERGED": Mark("failed to converge", "xxxx", "x"),
    "NOT_UNIQUE": Mark("several equilibria", "////", "^"),
    "ILL_POSED": Mark("ill posed: no equilibrium", "++++", "s"),
    "NOT_FINITE": Mark("loss not finite", "----", "d"),
}


def marks_of(record: Mapping[str, Any]) -> Iterator[tuple[Mark, np.ndarray]]:
    """Every reason that some point of a surface is not valid, with the points that have it."""
    status, bad = np.array(record["status"]), ~np.array(record["valid"], dtype=bool)
    for code, name in enumerate(record["status_names"]):
        where = bad & (status == code)
        if where.any():
            yield _MARKS.get(name) or Mark(str(name).lower().replace("_", " "), "oo", "o"), where


FIELDS = ("coordinates", "values", "status", "status_names", "valid")


def contour(
    records: Any, *, names: Sequence[str] | None = None, levels: int = 15, log: bool = False, path: Any = None, columns: int = 4
) -> Any:
    """Contours of one or several two-dimensional surfaces, on one scale of colours.

    Each point stands for the rectangle halfway to its neighbours. Where a point has no value it is
    grey and hatched by reason; where its value is not proved or not checked it is dotted. Contours
    stop before points without a value, and known points beside them have the colour of their own
    value. The legend names every mark.

    Args:
        records: A `Surface` or its record, or a list of them.
        names: Titles.
        levels: About how many contours.
        log: Contours and colours on a logarithmic scale; the losses must be positive.
        path: (points, 2) a training path in the coordinates of the only surface, see
            `landscape.path_directions`.
        columns: Panels side by side.

    Examples:
        >>> import torch, wellposed as wp
        >>> model, X = torch.nn.Linear(2, 1), torch.eye(2)
        >>> s = wp.landscape.surface(model, torch.nn.functional.mse_loss, X, torch.ones(2, 1), num=5)
        >>> figure = wp.plot.contour(s)
    """
    found = _grids(records)
    if path is not None and len(found) > 1:
        raise InvalidArgument(f"A path lies on one surface; got {len(found)}.")
    low, high = _range(found, log)
    across = min(columns, len(found))
    down = -(-len(found) // across)
    figure = new_figure(3.4 * across + 1.2, 3.2 * down + 0.4)  # first: it raises if matplotlib is missing
    from matplotlib import ticker
    from matplotlib.colors import LogNorm, Normalize

    norm = LogNorm(low, high) if log else Normalize(low, high)
    edges = np.geomspace(low, high, levels + 1) if log else ticker.MaxNLocator(levels).tick_values(low, high)
    axes = figure.subplots(down, across, squeeze=False)
    filled, handles = None, {}
    for i, (ax, record) in enumerate(zip(axes.flat, found, strict=False)):
        a, b = (array(axis) for axis in record["coordinates"])
        values = np.ma.masked_invalid(array(record["values"]))
        sides = _edges(a), _edges(b)
        ax.set_facecolor(UNKNOWN)
        if values.count():
            filled = ax.contourf(a, b, values.T, levels=edges, norm=norm, cmap="viridis", extend="max")
            # contours end at the last known point: behind them, its rectangle in the colour of its
            # contour
            band = np.ma.masked_array(filled.layers[np.digitize(values.filled(low), edges).clip(1) - 1], values.mask)
            ax.pcolormesh(*sides, band.T, norm=norm, cmap="viridis", zorder=filled.get_zorder() - 0.5)
            ax.contour(a, b, values.T, levels=edges, colors="black", linewidths=0.4, alpha=0.6)
        for mark, where in marks_of(record):
            mark.fill(ax, sides, where)
            handles[mark.label] = mark.patch()
        if path is not None:
            way = array(path)
            (handles["training path"],) = ax.plot(way[:, 0], way[:, 1], ".-", color=COLORS[1], linewidth=1, markersize=4)
        (handles["centre"],) = ax.plot(0, 0, "+", color="white", markersize=9, markeredgewidth=1.5, path_effects=_outlined())
        ax.set(xlabel="direction 1", ylabel="direction 2", xlim=(a[0], a[-1]), ylim=(b[0], b[-1]))
        if names is not None:
            ax.set_title(names[i], fontsize=10)
    for ax in axes.flat[len(found) :]:
        ax.set_axis_off()
    if filled is not None:
        figure.colorbar(filled, ax=axes, label="loss", shrink=0.9, format="%.3g", ticks=edges[:: max(1, len(edges) // 8)])
    figure.legend(
        list(handles.values()), list(handles), loc="outside lower center", ncols=2 * across, fontsize=7, handlelength=2.5
    )
    return figure


def surface(record: Any, *, title: str | None = None, log: bool = False, clip: float | None = None) -> Any:
    """A surface in perspective; points without a value are holes, marked on the floor.

    Args:
        record: A `Surface` or its record.
        title: Of the figure.
        log: Draw the decadic logarithm of the loss.
        clip: Losses above it are cut off, so that a steep wall does not hide the basin.

    Examples:
        >>> import torch, wellposed as wp
        >>> model, X = torch.nn.Linear(2, 1), torch.eye(2)
        >>> s = wp.landscape.surface(model, torch.nn.functional.mse_loss, X, torch.ones(2, 1), num=5)
        >>> figure = wp.plot.surface(s, title="a linear model")
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
    for i, (mark, where) in enumerate(marks_of(found)):
        floor = np.full(where.sum(), low)
        color = COLORS[(1 + i) % len(COLORS)]
        ax.scatter(A[where], B[where], floor, marker=mark.marker, s=12, color=color, label=mark.label)
    if ax.get_legend_handles_labels()[0]:
        ax.legend(loc="upper left", fontsize=8)
    ax.set(xlabel="direction 1", ylabel="direction 2", zlabel="log10 of the loss" if log else "loss")
    ax.zaxis.labelpad = 12  # beside the numbers, not on them
    ax.set_box_aspect(None, zoom=0.85)  # else the label of the vertical axis leaves the figure
    if title is not None:
        ax.set_title(title)
    return figure


def line(records: Mapping[str, Any] | Any, *, log: bool = False) -> Any:
    """Losses along one direction; stretches that are not known or not proved are hatched.

    Args:
        records: A one-dimensional `Surface` or its record, or a dictionary of them by name.
        log: A logarithmic scale of losses.

    Examples:
        >>> import torch, wellposed as wp
        >>> model, X = torch.nn.Linear(2, 1), torch.eye(2)
        >>> direction = wp.landscape.random_direction(model)
        >>> loss = torch.nn.functional.mse_loss
        >>> s = wp.landscape.surface(model, loss, X, torch.ones(2, 1), directions=[direction], num=5)
        >>> figure = wp.plot.line(s)
    """
    named = records if isinstance(records, Mapping) and "values" not in records else {"": records}
    figure = new_figure(6.0, 3.6)
    from matplotlib.colors import to_rgba

    ax = figure.subplots()
    handles: list[Any] = []
    for i, (name, one) in enumerate(named.items()):
        record = record_of(one, "surface", FIELDS)
        (a,) = (array(axis) for axis in record["coordinates"])
        values = array(record["values"])
        if values.ndim != 1:
            raise InvalidArgument(f"line draws surfaces of one direction; got one of shape {values.shape}. Use contour.")
        color = COLORS[i % len(COLORS)]
        ax.plot(a, values, ".-", color=color, linewidth=1.2, markersize=3, label=name or None)
        half = (a[1] - a[0]) / 2 if len(a) > 1 else 0.5
        for mark, where in marks_of(record):
            shade = {"facecolor": to_rgba(color, 0.05 if mark.valued else 0.15), "edgecolor": to_rgba(color, 0.5)}
            for place in a[where]:
                ax.axvspan(place - half, place + half, hatch=mark.hatch, linewidth=0, **shade)
            handles.append(mark.patch(label=f"{name} {mark.label}".strip(), **shade))
    ax.set(xlabel="direction 1", ylabel="loss")
    if log:
        ax.set_yscale("log")
    handles = [*ax.get_legend_handles_labels()[0], *handles]
    if handles:
        ax.legend(handles=handles, fontsize=8)
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


def _edges(axis: np.ndarray) -> np.ndarray:
    middle = (axis[1:] + axis[:-1]) / 2
    return np.concatenate([[2 * axis[0] - middle[0]], middle, [2 * axis[-1] - middle[-1]]])


def _outlined() -> list[Any]:
    """White marks stay visible in a legend on white."""
    from matplotlib.patheffects import withStroke

    return [withStroke(linewidth=3, foreground="black")]
