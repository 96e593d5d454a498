"""The page around its parts, one self-contained file; templates: page.html and parts.html."""

from __future__ import annotations

import base64
import functools
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, ClassVar

import jinja2
from markupsafe import Markup

from wellposed.errors import how_to_install
from wellposed_lab.runs.records import finite

__all__ = ["Figure", "Part", "Section", "can_draw", "number", "page", "table", "thinned"]

NO_PLOTLY = (
    f"plotly is not installed, so figures are shown as tables; install it and write the page again: {how_to_install('report')}."
)
#: Points of a line, and rows of the table under a figure.
DRAWN, LISTED = 1000, 40


@dataclass(frozen=True)
class Figure:
    """What is drawn, the same in words, and the same as a table.

    Attributes:
        key: In identifiers; letters and hyphens.
        title: Above it.
        traces, layout: For Plotly.
        alt: What a reader would see, in sentences.
        caption: How to read it.
        header, rows: The numbers.
        toggles: Whether the vertical axis can be switched between logarithmic and linear.
    """

    kind: ClassVar[str] = "figure"
    key: str
    title: str
    traces: list[dict[str, Any]]
    layout: dict[str, Any]
    alt: str
    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[Any]]
    toggles: bool = False

    @property
    def table(self) -> dict[str, Any]:
        """The numbers, at most `LISTED` rows."""
        return table(self.title, self.header, thinned(self.rows, LISTED))

    @property
    def listed_note(self) -> str:
        """How many rows the table has, if not all."""
        return "" if len(self.rows) <= LISTED else f", {LISTED} of {len(self.rows)} rows"


#: A figure, a string that replaces a missing part, or a dictionary whose "kind" parts.html knows; None is omitted.
Part = Figure | dict[str, Any] | str | None


@dataclass(frozen=True)
class Section:
    """Parts under a heading; `key` is used in identifiers."""

    key: str
    title: str
    parts: Sequence[Part] = field(default_factory=list)


def table(caption: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """A table. Cells: text, `Markup`, numbers (shown with four digits), None (shown as a dash)."""
    return {"kind": "table", "caption": caption, "header": header, "rows": rows}


def thinned(points: Sequence[Any], limit: int = DRAWN) -> list[Any]:
    """At most `limit` of the points, evenly spaced, with the first and the last."""
    if len(points) <= limit:
        return list(points)
    return [points[round(index * (len(points) - 1) / (limit - 1))] for index in range(limit)]


def number(value: Any) -> str:
    """Text unchanged, a float with four digits, None as a dash."""
    if value is None:
        return "–"
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:.4g}"
    return value if isinstance(value, str) else str(value)


def can_draw() -> bool:
    """Whether plotly is installed."""
    return _plotly() is not None


def page(title: str, subtitle: str, sections: Sequence[Section], remarks: Sequence[str] = ()) -> str:
    """A whole page.

    Args:
        title, subtitle: On top.
        sections: In order.
        remarks: Sentences under the title.
    """
    library = _plotly()
    figures = [part for section in sections for part in section.parts if isinstance(part, Figure)]
    scripts = [text for text in (library, _file("page.js")) if text is not None]
    drawn = [{"id": f"plot-{one.key}", "data": one.traces, "layout": one.layout} for one in figures]
    return templates().get_template("page.html").render(
        title=title,
        subtitle=subtitle,
        sections=sections,
        notes=[*remarks, *([NO_PLOTLY] if figures and library is None else [])],
        drawn=library is not None,
        figures=finite(drawn if library is not None else []),
        scripts=[Markup(text) for text in scripts],
        policy=_policy(scripts),
        css=Markup(_file("page.css")),
    )  # fmt: skip


@functools.cache
def templates() -> jinja2.Environment:
    """The templates, in which all text is escaped that is not `Markup`."""
    loader = jinja2.FunctionLoader(_file)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined, keep_trailing_newline=True
    )
    environment.filters["shown"] = number
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return environment


@functools.cache
def _plotly() -> str | None:
    """The JavaScript of Plotly."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        return None
    text: str = get_plotlyjs()
    assert "</script" not in text.lower()
    # a browser reads line ends as \n, and the hash in the policy is of what it reads
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _policy(scripts: Sequence[str]) -> str:
    hashes = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in scripts)
    allowed = " ".join(f"'sha256-{value}'" for value in hashes)
    rules = ("default-src 'none'", "style-src 'unsafe-inline'", "img-src data: blob:", "base-uri 'none'", "form-action 'none'")
    return "; ".join((*rules, f"script-src {allowed}"))


def _file(name: str) -> str:
    text = resources.files("wellposed_lab.report").joinpath(name).read_text(encoding="utf-8")
    return text.replace("\r\n", "\n")
