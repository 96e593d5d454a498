"""The progress display: lines now and then, a bar on a terminal, nothing if not wanted; always on stderr."""

from __future__ import annotations

import sys

import pytest

from wellposed._progress import ProgressDisplay, progress_display


@pytest.mark.parametrize("rich", [True, False])
def test_lines_where_stderr_is_not_a_terminal(
    rich: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not rich:
        monkeypatch.setitem(sys.modules, "rich.progress", None)
    with progress_display("work", 4, line="{title}: {percent} % {text}") as display:
        display.update(1, "too early for the next line")
        display.advance(2)
        display.update(4, lambda: "the end")
    assert capsys.readouterr() == ("", "work: 100 % the end\n")


def test_a_bar_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("FORCE_COLOR", "1")  # what makes rich take a pipe for a terminal
    with progress_display("work", bar="{done:.0f}/{total:.0f} {text}") as display:
        display.update(1, total=7)
        display.update(7, "[the end]")
    shown = capsys.readouterr()
    assert shown.out == "" and "work" in shown.err and "7/7 [the end]" in shown.err


def test_nothing_if_not_wanted(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_display("work", 2, show=False) as display:
        display.update(2, "the end")
    assert capsys.readouterr() == ("", "")


def test_a_text_is_made_only_if_it_is_shown() -> None:
    shown: list[tuple[float, float | None, str]] = []
    display = ProgressDisplay(3, 60.0, lambda *line: shown.append(line))
    for done in range(3):
        display.update(done, lambda: pytest.fail("nothing is shown yet"))
    display.update(3, lambda: "end")
    ProgressDisplay(3, 60.0, lambda *line: shown.append(line), ends=False).update(3, "end")
    assert shown == [(3, 3, "end")]
