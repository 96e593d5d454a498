"""mkdocs hook: a line is not broken at the hyphen of an option, a file name or a number.

A browser may end a line after each hyphen, so that `--full` and 1e-6 fall into two lines. White
space in code may still end a line, and so may a hyphen of a word that is too long for a phone.
"""

from __future__ import annotations

import html
import re

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

#: What stays as it is, code in a line, tags, and text: every character of a page is in one of them.
PART = re.compile(
    r"(?P<kept><(pre|script|style|svg)\b.*?</\2>)|(?P<open><code[^>]*>)(?P<code>[^<]*)(?=</code>)|(?P<tag><[^>]*>)|(?P<text>[^<]+)",
    re.DOTALL,
)
WORD = re.compile(r"[^\s-]*-\S+")
NUMBER = re.compile(r"\b\d+(?:\.\d+)?e-\d+\b")
#: Of a word that is kept in one line. A phone has room for about 40 characters, a cell of a table for fewer.
LONGEST = 24


def unbroken(content: str) -> str:
    """The HTML of a page, with `<span class="unbroken">` around words in code and around numbers."""

    def span(word: re.Match[str]) -> str:
        return f'<span class="unbroken">{word[0]}</span>' if len(html.unescape(word[0])) <= LONGEST else word[0]

    def part(found: re.Match[str]) -> str:
        if found["code"] is not None:
            return found["open"] + WORD.sub(span, found["code"])
        return NUMBER.sub(span, found[0]) if found["text"] else found[0]

    return PART.sub(part, content)


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    return unbroken(content)
