"""The audit: enough rows, honest evidence, and its three forms."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import wellposed as wp
from wellposed_lab.papers.audit import FINDINGS, PAPERS, AuditFinding, AuditRow, Evidence, Fact, audit, to_html, to_json
from wellposed_lab.papers.findings import gap

HOLDING = [finding for finding in FINDINGS if finding.verdict == "holds"]
KEYS = re.findall(r"@\w+\{(\w+),", (Path(__file__).parents[3] / "src" / "wellposed" / "references.bib").read_text())


def test_there_are_enough_rows() -> None:
    assert len(FINDINGS) - len(HOLDING) >= 40
    assert len(HOLDING) >= 10
    assert {finding.paper for finding in HOLDING} == set(PAPERS)


def test_rows_are_complete_and_distinct() -> None:
    for finding in FINDINGS:
        assert finding.claim and finding.verdict and finding.corrected
        assert finding.paper in KEYS
        assert (finding.check is None) == bool(finding.by)
    names = [(finding.paper, finding.name) for finding in FINDINGS]
    assert len(set(names)) == len(names)


@pytest.fixture(scope="module", params=[["xie2021"], pytest.param(list(PAPERS), marks=pytest.mark.slow)], ids=["one", "all"])
def rows(request: pytest.FixtureRequest) -> list[AuditRow]:
    """Of one paper; of all it is slow, and `test_findings.py` runs every check by itself."""
    began = time.process_time()
    rows = audit(request.param)
    assert time.process_time() - began < 60  # of one thread
    return rows


def papers(rows: list[AuditRow]) -> list[str]:
    return list(dict.fromkeys(row.finding.paper for row in rows))


def test_all_is_confirmed(rows: list[AuditRow]) -> None:
    findings = [finding for finding in FINDINGS if finding.paper in papers(rows)]
    assert len(rows) == len(findings)
    assert [(row.finding.claim, str(row.evidence)) for row in rows if row.confirmed is False] == []
    assert [row.finding.claim for row in rows if row.confirmed is None] == [f.claim for f in findings if f.check is None]
    assert [row.finding.paper for row in rows] == sorted((f.paper for f in findings), key=PAPERS.index)


def test_false_claims_have_evidence_against_the_print(rows: list[AuditRow]) -> None:
    # an order cannot be refuted, and a poor choice is not false
    for row in rows:
        if row.confirmed and not row.finding.verdict.startswith(("holds", "asymptotic", "poor")):
            assert "printed" in [fact.role for fact in row.evidence.facts], row.finding.claim
        if row.confirmed and not row.finding.verdict.startswith(("gap", "wrong (rests on Lemma 16)")):
            assert "corrected" in [fact.role for fact in row.evidence.facts], row.finding.claim


def test_json(rows: list[AuditRow]) -> None:
    document = json.loads(to_json(rows), parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))
    assert document["counts"]["rows"] == len(document["rows"]) == len(rows)
    assert document["counts"]["not confirmed"] == 0
    first = document["rows"][0]
    assert first["claim"] == rows[0].finding.claim
    assert first["evidence"][0]["value"] == rows[0].evidence.facts[0].value


def test_html(rows: list[AuditRow]) -> None:
    page = to_html(rows)
    assert page.count("<tr class=") == len(rows)
    assert "&lt;= " in page and "<= " not in page and "<x, W x>" not in page  # text is escaped
    assert page.count("<h2>") == len(papers(rows))


def test_a_false_fact_is_not_confirmed_and_is_seen() -> None:
    def check_wrong(e: Evidence) -> None:
        e.given("one", 1, "==", 1)
        e.printed("two", 2.0, "<", 1.0)

    row = AuditFinding("ling2022", "c", "p", "wrong", "k", check_wrong).run()
    assert row.confirmed is False
    assert "FALSE: two: 2 < 1" in str(row.evidence)
    assert 'class="no"' in to_html([row]) and "printed false" in to_html([row])
    assert json.loads(to_json([row]))["counts"]["not confirmed"] == 1
    assert Evidence().confirmed is False  # no evidence is no confirmation


@pytest.mark.parametrize("relation", ["<", "<=", ">", ">=", "=="])
def test_nan_is_never_evidence(relation: str) -> None:
    assert not Fact("printed", "x", math.nan, relation, 1.0).holds


def test_gap_of_other_shapes_is_infinite() -> None:
    assert gap(torch.zeros(2), torch.zeros(3)) == math.inf
    assert gap(torch.tensor([1.1]), torch.tensor([1.0])) == pytest.approx(0.1, rel=1e-5)


def test_papers_can_be_chosen() -> None:
    told: list[str] = []
    rows = audit(["xie2021"], listener=lambda finding: told.append(finding.claim), differing=True)
    assert {row.finding.paper for row in rows} == {"xie2021"}
    assert told == [row.finding.claim for row in rows]
    assert all(row.finding.verdict != "holds" for row in rows)
    with pytest.raises(wp.InvalidArgument, match="Did you mean 'ling2022'"):
        audit(["ling2021"])


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    testing = pytest.importorskip("typer.testing", reason="the extra 'cli' is not installed")
    from wellposed_lab.cli.commands import app

    monkeypatch.setenv("COLUMNS", "200")
    return lambda *words: testing.CliRunner().invoke(app, ["audit", *words])


def test_command(command: Callable[..., Any], tmp_path: Path) -> None:
    result = command("xie2021")
    assert result.exit_code == 0 and "Theorem 5" in result.stdout and "0 not confirmed" in result.stdout
    result = command("xie2021", "--differing", "--json")
    assert result.exit_code == 0 and json.loads(result.stdout)["counts"]["rows"] == 11
    result = command("xie2021", "--html", str(tmp_path / "audit.html"))
    assert result.exit_code == 0 and (tmp_path / "audit.html").read_text().startswith("<!doctype html>")
    assert command("xie2021", "--html", str(tmp_path / "none" / "audit.html")).exit_code == 2
    assert command("xie2022").exit_code == 2


def test_command_fails_if_a_verdict_is_not_borne_out(command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def check_wrong(e: Evidence) -> None:
        e.printed("two", 2.0, "<", 1.0)

    wrong = AuditFinding("xie2021", "c", "p", "wrong", "k", check_wrong)
    monkeypatch.setattr("wellposed_lab.papers.audit.FINDINGS", (wrong,))
    assert command("xie2021").exit_code == 1
