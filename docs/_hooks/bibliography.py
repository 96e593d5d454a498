"""`references.bib` as a Markdown page: one heading a key, in the order and the groups of the
file."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ENTRY = re.compile(r"^@(?P<kind>\w+)\{(?P<key>[^,\s]+),\n(?P<fields>.*?)^\}", re.MULTILINE | re.DOTALL)
FIELD = re.compile(r"^\s*(\w+)\s*=\s*\{(.*)\},?$", re.MULTILINE)
ACCENTS = {r"{\'o}": "ó", r"{\'i}": "í", r"{\v{z}}": "ž", r"{\L}": "Ł", "--": "–", r"\&": "&"}


def source(docs: Path) -> Path:
    """The file: part of the package, because `wp.cite` reads it too."""
    return docs.parent / "src" / "wellposed" / "references.bib"


@dataclass(frozen=True)
class Entry:
    key: str
    fields: dict[str, str]


def entries(bibliography: str) -> list[Entry]:
    """The entries of a BibTeX file in which every field has a line of its own."""
    return [Entry(m["key"], dict(FIELD.findall(m["fields"]))) for m in ENTRY.finditer(bibliography)]


def page(bibliography: str) -> str:
    """All entries for readers; the key of each is its heading, so that citations can lead to it."""
    items = [f"## {entry.key} {{ #{entry.key} }}\n\n{_sentence(entry.fields)}" for entry in entries(bibliography)]
    return "# Sources\n\nThe first five are the papers whose theorems the package implements.\n\n" + "\n\n".join(items) + "\n"


def _sentence(fields: dict[str, str]) -> str:
    authors = ", ".join(" ".join(reversed(name.split(", "))) for name in _plain(fields["author"]).split(" and "))
    where = [
        _plain(fields[name])
        for name in ("booktitle", "journal", "institution", "school", "publisher", "howpublished")
        if name in fields
    ]
    where += [f"{word} {_plain(fields[name])}" for name, word in (("volume", "volume"), ("pages", "pages")) if name in fields]
    where += [f"arXiv:{fields['eprint']}"] if "eprint" in fields else []
    note = f" {_plain(fields['note'])}." if "note" in fields else ""
    return f"{authors}: *{_plain(fields['title'])}*. {', '.join([*where, fields['year']])}.{note}"


def _plain(text: str) -> str:
    for written, meant in ACCENTS.items():
        text = text.replace(written, meant)
    return text.replace("{", "").replace("}", "")
