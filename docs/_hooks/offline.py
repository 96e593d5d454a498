"""mkdocs hook: a page of the site loads nothing from elsewhere, or the build fails.

Links that a reader may follow are allowed; scripts, styles, fonts, pictures and frames must be
files of the site.
"""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError

ELSEWHERE = re.compile(r"\s*(https?:)?//", re.IGNORECASE)
IN_STYLE = re.compile(r"(?:@import\s+|url\()\s*[\"']?\s*((?:https?:)?//[^\"')\s]+)", re.IGNORECASE)
#: Of these attributes the browser loads the value; `href` only of <link>, where it is no mere statement.
LOADED = ("src", "srcset", "poster", "data", "action")
STATEMENTS = {"canonical", "alternate", "author", "license", "prev", "next"}


class Loads(HTMLParser):
    """Collects what a page would load from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        loaded = [values[name] for name in LOADED if name in values]
        if tag == "link" and not STATEMENTS & set(values.get("rel", "").split()):
            loaded.append(values.get("href", ""))
        self.found += [value for value in loaded if ELSEWHERE.match(value)]
        self.found += IN_STYLE.findall(values.get("style", ""))


def loads_from_elsewhere(text: str, suffix: str) -> list[str]:
    """Addresses of other hosts from which the HTML or CSS in `text` would load something."""
    if suffix == ".css":
        return IN_STYLE.findall(text)
    parser = Loads()
    parser.feed(text)
    styles = re.findall(r"<style[^>]*>(.*?)</style>", text, flags=re.DOTALL | re.IGNORECASE)
    return parser.found + [address for style in styles for address in IN_STYLE.findall(style)]


def on_post_build(config: MkDocsConfig) -> None:
    for path in sorted(Path(config.site_dir).rglob("*")):
        if path.suffix in (".html", ".css", ".svg"):
            for address in loads_from_elsewhere(path.read_text(encoding="utf-8"), path.suffix):
                raise PluginError(f"{path.relative_to(config.site_dir)} loads {address}; the site must do without the network.")
