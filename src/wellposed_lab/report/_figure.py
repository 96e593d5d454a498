"""A figure of the page: what Plotly draws, the same in words, and the same as a table."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from wellposed_lab.report._html import Html, el, table

__all__ = ["COLOURS", "Figure", "axes", "line", "plain", "thinned"]

#: At least 3:1 against the light and the dark background, so that no figure depends on the theme.
COLOURS = ("#3b82f6", "#d97706", "#16a34a", "#8b5cf6", "#ef4444", "#0d9488", "#db2777", "#6b7280")
#: Marks on lines, one for each time that the colours begin again.
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star")
#: Points of a line, and rows of the table under a figure.
DRAWN, LISTED = 1000, 40


@dataclass(frozen=True)
class Figure:
    """What is drawn, said and listed.

    Attributes:
        key: In identifiers; letters and hyphens.
        title: Above it.
        traces, layout: For Plotly.
        alt: What a reader would see, in sentences.
        caption: How to read it.
        header, rows: The numbers.
        toggles: Whether the vertical axis can be switched between logarithmic and linear.
    """

    key: str
    title: str
    traces: list[dict[str, Any]]
    layout: dict[str, Any]
    alt: str
    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[Any]]
    toggles: bool = False

    def to_html(self, *, drawn: bool) -> Html:
        """The figure element; its picture is drawn by page.js.

        Args:
            drawn: Whether there is something to draw it with; else the table stands open.
        """
        title = f"{self.key}-title"
        tools = []
        if self.toggles:
            tools.append(el("button", "Linear axis", type="button", data_axis=self.key, aria_pressed="false"))
        tools.append(el("button", "Reset view", type="button", data_reset=self.key))
        if drawn:
            picture = el("div", class_="plot", id=f"plot-{self.key}", role="img", aria_label=f"{self.title}. {self.alt}")
            # a page that is opened without JavaScript has the words and the table
            parts = [el("div", *tools, class_="tools"), picture]
        else:
            parts = [el("p", self.alt, class_="alt")]
        listed = thinned(self.rows, LISTED)
        count = "" if len(listed) == len(self.rows) else f", {len(listed)} of {len(self.rows)} rows"
        numbers = el(
            "details", el("summary", f"Numbers: {self.title}{count}"), table(self.title, self.header, listed), open=not drawn
        )
        return el(
            "figure",
            el("h3", self.title, id=title),
            *parts,
            el("figcaption", self.caption),
            numbers,
            aria_labelledby=title,
            id=self.key,
        )

    def to_plotly(self) -> dict[str, Any]:
        """What page.js passes on to Plotly."""
        return {"id": f"plot-{self.key}", "data": self.traces, "layout": self.layout}


def plain(text: str) -> str:
    """Text for Plotly, which understands a few tags in names and labels."""
    return html.escape(text, quote=False)


def thinned(points: Sequence[Any], limit: int = DRAWN) -> list[Any]:
    """At most `limit` of the points, evenly, first and last among them."""
    if len(points) <= limit:
        return list(points)
    return [points[round(index * (len(points) - 1) / (limit - 1))] for index in range(limit)]


def line(name: str, points: Iterable[tuple[Any, Any]], colour: int, **options: Any) -> dict[str, Any]:
    """A trace of points joined by lines.

    Args:
        name: In the legend.
        points: (x, y); y None breaks the line.
        colour: Number of the colour; where all were used they come again with other marks on the line.
        options: Of the trace, in place of the defaults.
    """
    pairs = thinned(list(points))
    shade = COLOURS[colour % len(COLOURS)]
    style = {"color": shade, "width": 2, **options.pop("line", {})}
    turn = colour // len(COLOURS)
    marker = {"color": shade, "size": 6, "symbol": SYMBOLS[turn % len(SYMBOLS)], **options.pop("marker", {})}
    if turn:
        marker |= {"size": 8, "maxdisplayed": 20}
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(pairs) <= 40 or turn else "lines",
        "name": plain(name),
        "x": [x for x, _ in pairs],
        "y": [y for _, y in pairs],
        "line": style,
        "marker": marker,
        "hovertemplate": "%{y:.4g}",
        **options,
    }


def axes(x: str, y: str, *, log: bool = False, **options: Any) -> dict[str, Any]:
    """A layout with titled axes.

    Args:
        x, y: Titles.
        log: Whether the vertical axis is logarithmic.
        options: Further entries of the layout.
    """
    vertical: dict[str, Any] = {"title": _title(y), "type": "log" if log else "linear", "automargin": True}
    if log:
        vertical["exponentformat"] = "power"
    return {"xaxis": {"title": _title(x), "automargin": True}, "yaxis": vertical, **options}


def _title(text: str) -> dict[str, Any]:
    return {"text": plain(text), "font": {"size": 13}, "standoff": 8}
