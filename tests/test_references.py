"""Every source cited in the code is an entry of src/wellposed/references.bib."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
CITATION = re.compile(r"\[([a-z]+[12][0-9]{3}[a-z]?)\]")
ENTRY = re.compile(r"^@(\w+)\{([^,\s]+),(.*?)^\}", re.MULTILINE | re.DOTALL)

BIBLIOGRAPHY = (ROOT / "src" / "wellposed" / "references.bib").read_text(encoding="utf-8")
KEYS = [key for _, key, _ in ENTRY.findall(BIBLIOGRAPHY)]


def test_citations_exist() -> None:
    unknown = {
        f"{path.relative_to(ROOT)}: [{key}]"
        for path in (ROOT / "src").rglob("*.py")
        for key in CITATION.findall(path.read_text(encoding="utf-8"))
        if key not in KEYS
    }
    assert not unknown, "not in src/wellposed/references.bib: " + ", ".join(sorted(unknown))


def test_entries_are_complete_and_unique() -> None:
    assert len(KEYS) == len(set(KEYS)) == len(re.findall(r"^@", BIBLIOGRAPHY, re.MULTILINE))
    for _, key, fields in ENTRY.findall(BIBLIOGRAPHY):
        names = re.findall(r"^\s*(\w+)\s*=", fields, re.MULTILINE)
        assert {"author", "title", "year"} <= set(names), f"{key} lacks an author, a title or a year"
        assert CITATION.fullmatch(f"[{key}]"), f"{key} does not look like a citation, so it would never be checked"
