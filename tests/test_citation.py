"""CITATION.cff is valid enough to be cited from, and says what the package and the bibliography say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import wellposed

ROOT = Path(__file__).parents[1]
yaml = pytest.importorskip("yaml", reason="reading CITATION.cff needs pyyaml, which comes with the extra cli")

#: The papers whose theorems the package implements, by their keys in src/wellposed/references.bib.
PAPERS = ("nguyen2022", "xie2021", "ling2022", "gao2022", "gao2023")


@pytest.fixture(scope="module")
def citation() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "CITATION.cff").read_text())


def entry(key: str) -> str:
    """The text of one entry of the bibliography."""
    found = re.search(
        rf"^@\w+{{{key},\n(.*?)^}}", (ROOT / "src" / "wellposed" / "references.bib").read_text(), re.DOTALL | re.MULTILINE
    )
    assert found is not None
    return found[1]


def field(key: str, name: str) -> str | None:
    found = re.search(rf"^\s*{name}\s*=\s*{{(.*)}},$", entry(key), re.MULTILINE)
    return None if found is None else found[1].replace("{", "").replace("}", "")


def test_fields_of_the_format(citation: dict[str, Any]) -> None:
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= set(citation)  # what version 1.2.0 of the format requires
    assert citation["license"] == "MIT"
    for reference in citation["references"]:
        assert {"type", "title", "authors"} <= set(reference)
        assert all({"family-names", "given-names"} <= set(author) for author in reference["authors"])


def test_version_is_that_of_the_package(citation: dict[str, Any]) -> None:
    assert citation["version"] == wellposed.__version__


@pytest.mark.parametrize("key", PAPERS)
def test_papers_are_those_of_the_bibliography(citation: dict[str, Any], key: str) -> None:
    title = field(key, "title")
    (reference,) = [one for one in citation["references"] if one["title"] == title]
    assert str(reference["year"]) == field(key, "year")
    names = " and ".join(f"{author['family-names']}, {author['given-names']}" for author in reference["authors"])
    assert names == field(key, "author")
    eprint = field(key, "eprint")
    assert [one["value"] for one in reference.get("identifiers", [])] == ([] if eprint is None else [f"arXiv:{eprint}"])


def test_no_other_papers(citation: dict[str, Any]) -> None:
    assert len(citation["references"]) == len(PAPERS)
