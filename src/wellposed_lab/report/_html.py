"""HTML in which text is escaped unless it is known to be HTML."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["Html", "el", "embedded", "number", "script", "table"]

#: Elements without an end tag.
_VOID = {"meta", "br"}


class Html(str):
    """Text that is HTML already; everything else is escaped by `el`."""


def el(tag: str, *children: Any, **attributes: Any) -> Html:
    """An element. Children that are not `Html` are escaped; None and False leave a child or an attribute out.

    >>> el("p", "a < b", class_="note")
    '<p class="note">a &lt; b</p>'

    Args:
        tag: Its name.
        children: Text, `Html`, numbers.
        attributes: Underscores become hyphens, and one at the end is dropped; True is an attribute without a value.
    """
    words = [tag]
    for name, value in attributes.items():
        name = name.rstrip("_").replace("_", "-")
        if value is True:
            words.append(name)
        elif value is not None and value is not False:
            words.append(f'{name}="{html.escape(str(value), quote=True)}"')
    opening = Html(f"<{' '.join(words)}>")
    return opening if tag in _VOID else Html(f"{opening}{_joined(children)}</{tag}>")


def _joined(children: Iterable[Any]) -> str:
    kept = (child for child in children if child is not None and child is not False)
    return "".join(child if isinstance(child, Html) else html.escape(str(child), quote=True) for child in kept)


def table(caption: str, header: Sequence[str], rows: Iterable[Sequence[Any]], *, row_headers: bool = True) -> Html:
    """A table that scrolls sideways within itself, by keyboard too.

    Args:
        caption: What it shows; seen and read aloud.
        header: Of the columns.
        rows: Cells: text, `Html`, numbers (shown with four digits), None (shown as a dash).
        row_headers: Whether the first cell of a row names it.
    """
    lines = []
    for row in rows:
        cells = [_cell(value, heading=row_headers and index == 0) for index, value in enumerate(row)]
        lines.append(el("tr", *cells))
    head = el("thead", el("tr", *(el("th", name, scope="col") for name in header)))
    whole = el("table", el("caption", caption), head, el("tbody", *lines))
    return el("div", whole, class_="scroll", tabindex="0", role="region", aria_label=caption)


def _cell(value: Any, *, heading: bool) -> Html:
    if heading:
        return el("th", value if isinstance(value, str) else number(value), scope="row")
    numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
    return el("td", value if isinstance(value, str) else number(value), class_="number" if numeric else None)


def number(value: Any) -> str:
    """A number with four digits; whole numbers as they are, None as a dash."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.4g}" if math.isfinite(value) else str(value)
    return str(value)


def embedded(value: Any) -> str:
    """JSON that can stand in a script element: nothing in it can end the element; NaN and infinities become null."""
    text = json.dumps(_finite(value), allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text  # other unusual characters, such as U+2028, are escaped by json already


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def script(text: str, **attributes: Any) -> Html:
    """A script element; its text must not end it."""
    if "</script" in text.lower():
        raise ValueError("The text of a script must not contain its end tag.")
    return el("script", Html(text), **attributes)
