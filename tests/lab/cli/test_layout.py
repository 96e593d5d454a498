"""Text in a narrow terminal: wrapped at words, never cut, complete."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.table import Table
from typer.testing import CliRunner

from wellposed_lab.cli._app import print_labelled, print_table, print_wrapped
from wellposed_lab.cli.commands import app

words = st.lists(st.text("abc[]|/{}", min_size=1, max_size=12), min_size=1, max_size=40).map(" ".join)
fixtures = [HealthCheck.function_scoped_fixture]


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    monkeypatch.setenv("COLUMNS", "60")
    return lambda: capsys.readouterr().out.splitlines()


@settings(deadline=None, max_examples=25, suppress_health_check=fixtures)
@given(text=words)
def test_every_word_is_there_and_lines_fit(text: str, shown: Callable[[], list[str]]) -> None:
    print_labelled("label", text, indent=9, style="bold")
    lines = shown()
    assert lines[0].startswith("label    ") and all(line.startswith(" " * 9) for line in lines[1:])
    assert " ".join(lines).split() == ["label", *text.split()] and max(map(len, lines)) <= 60
    print_wrapped(text)
    lines = shown()
    assert " ".join(lines).split() == text.split() and max(map(len, lines)) <= 60
    assert all(line.startswith("  ") for line in lines[1:])


def test_a_long_path_stays_whole(shown: Callable[[], list[str]]) -> None:
    path = "/".join(["folder"] * 20)
    print_wrapped(f"see {path}")
    assert path in " ".join(shown())


def test_tables_are_folded_and_not_cut(shown: Callable[[], list[str]]) -> None:
    table = Table("name", "what")
    table.add_row("x" * 50, "y" * 100)
    print_table(table)
    text = "\n".join(shown())
    assert "…" not in text and text.count("x") == 50 and text.count("y") == 100
    assert max(map(len, text.splitlines())) <= 60


def test_the_audit_in_eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = CliRunner().invoke(app, ["audit", "xie2021", "--differing"])
    lines = result.stdout.splitlines()
    assert result.exit_code == 0 and lines[0] == "[xie2021]" and max(map(len, lines)) <= 80
    summary = len(lines) - lines[::-1].index("")
    texts = [line for line in lines[:summary] if line.startswith("  ")]
    assert {line[:13].strip() for line in texts} == {"printed", "verdict", "corrected", "this run", ""}
    assert "s." in lines[-1]
