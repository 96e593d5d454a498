"""mkdocs hook: a link to a file outside `docs/` stays as plain text, for the site has no such file.

On a page that is read in the source tree the link works; in the site it would be broken.
"""

from __future__ import annotations

import posixpath
import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

LINK = re.compile(r"\[([^\]]+)\]\(((?!https?:|mailto:|#)[^)#\s]+)(#[^)]*)?\)")


def without_outside_links(markdown: str, folder: str) -> str:
    """`markdown` of a page in `folder` (relative to docs/), links that lead above docs/ replaced by
    their text."""

    def replacement(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[2]))
        return link[1] if target.startswith("../") else link[0]

    return LINK.sub(replacement, markdown)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    return without_outside_links(markdown, posixpath.dirname(page.file.src_uri))
