"""Every finding about a paper: its check confirms it now, and docs/findings.md shows what its folder says."""

from __future__ import annotations

from pathlib import Path

import pytest

import wellposed as wp
from wellposed_lab.papers.audit import AUDITS, FINDINGS, MARKER, PAPERS, AuditFinding, main, to_markdown

PAGE = Path(__file__).parents[3] / "docs" / "findings.md"
CHECKED = [finding for finding in FINDINGS if finding.check is not None]


@pytest.mark.parametrize("finding", CHECKED, ids=lambda finding: f"{finding.paper}-{finding.name}")
def test_the_numbers_confirm_it(finding: AuditFinding) -> None:
    """A check fails if the printed form were right, or if what is said to hold did not."""
    row = finding.run()
    assert row.evidence.facts
    assert [str(fact) for fact in row.evidence.facts if not fact.holds] == []
    assert row.confirmed is True


def test_the_page_is_up_to_date() -> None:
    head, marker, generated = PAGE.read_text(encoding="utf-8").partition(MARKER)
    assert marker and "## What follows for certificates" in head
    assert generated == f"\n{to_markdown()}", "run `make findings`"


def test_the_page_has_every_finding_that_differs() -> None:
    page = to_markdown()
    assert [line.split("]")[0].removeprefix("## [") for line in page.splitlines() if line.startswith("## ")] == list(PAPERS)
    for finding in FINDINGS:
        row = f"| {finding.claim} | {finding.printed} | {finding.verdict} | {finding.corrected} | "
        differs = finding.verdict != "holds"
        assert (row.replace("|  |", "| |") in page) is differs
        assert finding.check is None or (f"| `{finding.name}` |" in page) is differs
    rows = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith(("| ---", "| claim"))]
    assert len(rows) == sum(finding.verdict != "holds" for finding in FINDINGS)


def test_only_the_generated_part_is_written(tmp_path: Path) -> None:
    page = tmp_path / "findings.md"
    page.write_text(f"# Head\n\n{MARKER}\nold\n", encoding="utf-8")
    main(str(page))
    assert page.read_text(encoding="utf-8") == f"# Head\n\n{MARKER}\n{to_markdown()}"
    page.write_text("# Head\n", encoding="utf-8")
    with pytest.raises(wp.InvalidArgument, match="has no line"):
        main(str(page))
    assert page.read_text(encoding="utf-8") == "# Head\n"


def test_everything_about_a_paper_is_in_its_folder() -> None:
    for key, paper in AUDITS.items():
        for finding in paper.findings:
            assert finding.paper == key
            assert finding.check is None or finding.check.__module__.startswith(f"wellposed_lab.papers.{key}.")
        checks = {name for module in paper.modules for name in vars(module) if name.startswith("check_")}
        assert checks == {finding.name for finding in paper.findings if finding.check is not None}


def test_a_row_is_read_as_it_is_written() -> None:
    (finding,) = [finding for finding in FINDINGS if finding.name == "check_norm_of_equilibria"]
    assert finding.printed == "|Z|_F <= |X|_F |U|/m"  # bars of formulas are escaped in the table
    with pytest.raises(AssertionError, match="names check_nothing, which its audit does not have"):
        AUDITS["ling2022"]._finding("| a | b | typo | c | `check_nothing` |")
