"""The page of findings and the checks behind it agree: each check named exists, and each check is named."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from wellposed_lab.papers.audit import FINDINGS

ROOT = Path(__file__).parents[4]
PAGE = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")
SECTIONS = {key: body for key, body in re.findall(r"^## \[(\w+)\].*?\n(.*?)(?=^## |\Z)", PAGE, flags=re.MULTILINE | re.DOTALL)}
PAPERS = ["nguyen2022", "xie2021", "ling2022", "gao2022", "gao2023"]


def test_sections() -> None:
    assert list(SECTIONS) == PAPERS


@pytest.mark.parametrize("paper", PAPERS)
def test_checks_and_rows_agree(paper: str) -> None:
    source = (Path(__file__).parent / f"test_{paper}.py").read_text(encoding="utf-8")
    functions = {node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    named = set(re.findall(r"`(test_\w+)`", SECTIONS[paper]))
    assert named == {name for name in functions if name.startswith("test_")}


@pytest.mark.parametrize("paper", PAPERS)
def test_rows_are_complete(paper: str) -> None:
    rows = [line for line in SECTIONS[paper].splitlines() if line.startswith("| ")][1:]
    assert rows
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert len(cells) == 5, row
        assert cells[0] and cells[2] and cells[3] and cells[4], row


@pytest.mark.parametrize("paper", PAPERS)
def test_the_audit_says_what_the_page_says(paper: str) -> None:
    rows = [line for line in SECTIONS[paper].splitlines() if line.startswith("| ")][1:]
    page = [tuple(cell.strip().strip("`") for cell in row.strip("|").split("|")) for row in rows]
    audited = [f for f in FINDINGS if f.paper == paper and f.verdict != "holds"]
    assert page == [(f.claim, f.printed, f.verdict, f.corrected, f.name) for f in audited]
