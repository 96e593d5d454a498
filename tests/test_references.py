"""Every source cited in the code is an entry of src/wellposed/references.bib."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
KEY = r"[a-z]+[12][0-9]{3}[a-z]?"
CITATION = re.compile(rf"\[({KEY})\]")
#: [bai2019], [ling2022, eq. (7)], [ling2022; gao2022, Lemma 3]: a bracket that begins with a key.
CITATIONS = re.compile(rf"\[({KEY}(?:[,;][^\]]*)?)\]")
ENTRY = re.compile(r"^@(\w+)\{([^,\s]+),(.*?)^\}", re.MULTILINE | re.DOTALL)

BIBLIOGRAPHY = (ROOT / "src" / "wellposed" / "references.bib").read_text(encoding="utf-8")
#: The types that every BibTeX style knows; others, such as @thesis, are of biblatex.
TYPES = set("article book booklet inbook incollection inproceedings manual mastersthesis misc phdthesis techreport".split())
KEYS = [key for _, key, _ in ENTRY.findall(BIBLIOGRAPHY)]


def cited(text: str) -> set[str]:
    """The keys in all brackets that begin with one; parts without one are places, such as eq. (7)."""
    parts = (part for bracket in CITATIONS.findall(text) for part in re.split("[,;] *", bracket))
    return {part for part in parts if re.fullmatch(KEY, part)}


def test_every_form_of_a_citation_is_seen() -> None:
    text = "[bai2019] and [ling2022, eq. (7)], [ling2022; gao2022, Lemma 3], not [this] nor [0, 1] or a2019"
    assert cited(text) == {"bai2019", "ling2022", "gao2022"}


def test_citations_exist() -> None:
    folders = ("src", "docs", "examples", "benchmarks")
    files = [path for folder in folders for kind in ("*.py", "*.md") for path in (ROOT / folder).rglob(kind)]
    unknown = {
        f"{path.relative_to(ROOT)}: [{key}]"
        for path in (*files, *ROOT.glob("*.md"))
        for key in cited(path.read_text(encoding="utf-8"))
        if key not in KEYS
    }
    assert not unknown, "not in src/wellposed/references.bib: " + ", ".join(sorted(unknown))


def test_entries_are_complete_and_unique() -> None:
    assert len(KEYS) == len(set(KEYS)) == len(re.findall(r"^@", BIBLIOGRAPHY, re.MULTILINE))
    for kind, key, fields in ENTRY.findall(BIBLIOGRAPHY):
        assert kind in TYPES, f"{key}: BibTeX has no type @{kind}; expected one of {', '.join(sorted(TYPES))}"
        names = re.findall(r"^\s*(\w+)\s*=", fields, re.MULTILINE)
        assert {"author", "title", "year"} <= set(names), f"{key} lacks an author, a title or a year"
        assert CITATION.fullmatch(f"[{key}]"), f"{key} does not look like a citation, so it would never be checked"
