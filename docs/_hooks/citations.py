"""mkdocs hook: `[ling2022]` and `[ling2022, eq. 14]` lead to the page of sources, which is made of
`references.bib`.

The links also work in the docstrings of the reference, because autorefs resolves them when all
pages are there. And `<x, y>` is an inner product: nothing within a line is taken for an HTML tag.
"""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree.ElementTree import Element

from bibliography import entries, page, source
from markdown import Markdown
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

PAGE = "references.md"


class Citation(InlineProcessor):
    """A key in brackets, perhaps with a place behind a comma; not the text of a link."""

    def handleMatch(self, m: re.Match[str], data: str) -> tuple[Element, int, int]:  # type: ignore[override]
        element = Element("autoref", {"identifier": m[1], "optional": ""})
        element.text = m[0]
        return element, m.start(0), m.end(0)


class Citations(Extension):
    def __init__(self, keys: list[str]) -> None:
        super().__init__()
        self.keys = keys

    def extendMarkdown(self, md: Markdown) -> None:
        pattern = rf"\[({'|'.join(self.keys)})(?:, [^\][]*)?\](?![(\[])"
        md.inlinePatterns.register(Citation(pattern, md), "citation", 175)  # before references and links, after `code`
        md.inlinePatterns.deregister("html")


def _bibliography(config: MkDocsConfig) -> str:
    return source(Path(config.docs_dir)).read_text(encoding="utf-8")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.markdown_extensions.append(Citations([entry.key for entry in entries(_bibliography(config))]))  # type: ignore[arg-type]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    files.append(File.generated(config, PAGE, content=page(_bibliography(config))))
    return files
