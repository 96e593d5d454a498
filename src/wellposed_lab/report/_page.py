"""The page around the parts: one file that needs nothing else."""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources

from wellposed.errors import how_to_install
from wellposed_lab.report._figure import Figure
from wellposed_lab.report._html import Html, el, embedded, script
from wellposed_lab.report._sections import sentence

__all__ = ["Section", "can_draw", "page"]

NO_PLOTLY = (
    f"plotly is not installed, so figures are shown as tables; install it and write the page again: {how_to_install('report')}."
)


@dataclass
class Section:
    """A part of the page with a heading.

    Attributes:
        key: In identifiers.
        title: The heading.
        parts: Figures, HTML, and text, which stands in the place of something missing; None is left out.
    """

    key: str
    title: str
    parts: Sequence[Figure | Html | str | None] = field(default_factory=list)

    @property
    def figures(self) -> list[Figure]:
        """Those among the parts."""
        return [part for part in self.parts if isinstance(part, Figure)]

    def to_html(self, *, drawn: bool) -> Html:
        """A section element."""
        parts = []
        for part in self.parts:
            if isinstance(part, Figure):
                parts.append(part.to_html(drawn=drawn))
            elif part is not None:
                parts.append(part if isinstance(part, Html) else sentence(part))
        return el("section", el("h2", self.title, id=self.key), *parts, aria_labelledby=self.key)


def can_draw() -> bool:
    """Whether plotly is installed."""
    return _plotly() is not None


@functools.cache
def _plotly() -> str | None:
    """The JavaScript of Plotly."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        return None
    text: str = get_plotlyjs()
    # a browser reads line ends as \n, and the hash in the policy below is of what it reads
    return text.replace("\r\n", "\n").replace("\r", "\n")


def page(title: str, subtitle: str, sections: Sequence[Section], remarks: Sequence[str] = ()) -> str:
    """A whole page.

    Args:
        title, subtitle: On top.
        sections: In order.
        remarks: Sentences under the title.
    """
    library = _plotly()
    drawn = library is not None
    figures = [figure.to_plotly() for section in sections for figure in section.figures]
    own = _file("page.js")
    code = [text for text in (library, own) if text is not None]
    notes = [*remarks, *([] if drawn or not figures else [NO_PLOTLY])]
    body = el(
        "body",
        el("a", "Skip to the content", href="#content", class_="skip"),
        el(
            "header",
            el("div", el("h1", title), el("p", subtitle), class_="titles"),
            el("button", "Dark", type="button", id="theme", aria_pressed="false", title="Switch between light and dark"),
        ),
        el("nav", el("ul", *(el("li", el("a", s.title, href=f"#{s.key}")) for s in sections)), aria_label="Parts"),
        el(
            "main",
            el("div", el("ul", *(el("li", note) for note in notes)), class_="remarks", role="note") if notes else None,
            *(section.to_html(drawn=drawn) for section in sections),
            id="content",
            tabindex="-1",
        ),
        script(embedded(figures if drawn else []), type="application/json", id="figures"),
        *(script(text) for text in code),
    )
    head = el(
        "head",
        el("meta", charset="utf-8"),
        # only the scripts written here run, and nothing is fetched from anywhere
        el("meta", http_equiv="Content-Security-Policy", content=_policy(code)),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("title", title),
        el("style", Html(_file("page.css"))),
    )
    return f"<!DOCTYPE html>\n{el('html', head, body, lang='en')}\n"


def _policy(code: Sequence[str]) -> str:
    hashes = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in code)
    allowed = " ".join(f"'sha256-{value}'" for value in hashes)
    rules = ("default-src 'none'", "style-src 'unsafe-inline'", "img-src data: blob:", "base-uri 'none'", "form-action 'none'")
    return "; ".join((*rules, f"script-src {allowed}"))


def _file(name: str) -> str:
    text = resources.files("wellposed_lab.report").joinpath(name).read_text(encoding="utf-8")
    return text.replace("\r\n", "\n")
